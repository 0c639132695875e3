"""One block through the cleaner: what is dropped, changed and kept, and in which bytes."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron.errors import DataError
from tests.trident.corpus.cleaning.runs import write_jsonl
from trident.corpus.cleaning.cleaner import Cleaner, CleanWork
from trident.corpus.cleaning.contamination import EvaluationSets
from trident.corpus.cleaning.documents.clean_options import CleanOptions, ContaminationChoice, LengthLimits
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.input_blocks import blocks
from trident.corpus.workers.pool import WorkerPool
from trident.corpus.workers.processes import WorkerError

LINES = b'{"text": "a  b", "n": 1}\n{"text": " "}\nno json\n{"text": "long enough text"}\n'


def clean(options: CleanOptions) -> tuple[list[str], list[tuple[int, str]]]:
    """The kept lines, and number and reason of the dropped documents."""
    cleaned = Cleaner(options).clean(InputBlock("in.jsonl", 0, len(LINES), LINES, 0))
    assert cleaned.lines == 4 and len(cleaned.passed) == len(cleaned.sizes)
    return cleaned.output.decode().splitlines(), [(entry.number, entry.reason) for entry in cleaned.dropped]


def test_lines_that_do_not_change_keep_their_bytes() -> None:
    kept, dropped = clean(CleanOptions(skip_bad_lines=True))
    assert kept == ['{"text": "a  b", "n": 1}', '{"text": "long enough text"}']
    assert sorted(dropped) == [(1, "empty"), (2, "bad line")]


def test_filters_reject_and_say_why() -> None:
    kept, dropped = clean(CleanOptions(skip_bad_lines=True, lengths=LengthLimits(minimum_words=3)))
    assert kept == ['{"text": "long enough text"}'] and (0, "too few words") in dropped


def test_originals_are_kept_if_wanted() -> None:
    cleaned = Cleaner(CleanOptions(skip_bad_lines=True, keep_originals=True)).clean(
        InputBlock("in.jsonl", 0, len(LINES), LINES, 0)
    )
    assert len(cleaned.original_sizes) == 4 and b"no json" in cleaned.originals


OPTIONS = CleanOptions(exact_duplicates=True, normalize_space=True)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_results_are_in_order_and_equal_those_of_one_process(tmp_path: Path, method: str) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", [f"{number} " * (number % 7) for number in range(200)])
    (tmp_path / "task.txt").write_text("".join(f"{number} {number} {number}\n" for number in (101, 102, 104)))
    contamination = ContaminationChoice((str(tmp_path / "task.txt"),), run=3, shortest_run=2, drops=True)
    evaluation = EvaluationSets(contamination)
    assert evaluation.ignore(np.array([0, 11, 0])) == 1
    cleaner = Cleaner(replace(OPTIONS, contamination=contamination), evaluation)
    with WorkerPool(CleanWork(cleaner), 2, method) as pool:
        found = list(pool.run(blocks([str(source)], 500)))
        assert len(pool.process_ids) == 2
    assert len(found) > 6
    assert sum(entry.reason == "contaminated" for _, result in found for entry in result.dropped) == 2
    for block, result in found:
        expected = cleaner.clean(block)
        assert (result.output, result.dropped, result.changed) == (expected.output, expected.dropped, expected.changed)
        assert result.digests.tobytes() == expected.digests.tobytes()
        assert result.passed.tolist() == expected.passed.tolist()


def test_a_killed_worker_is_named(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "in.jsonl", ["text"] * 100)
    with (
        WorkerPool(CleanWork(Cleaner(OPTIONS)), 1) as pool,
        pytest.raises(
            WorkerError, match=r"cleaning worker 0 \(pid \d+\) was killed by signal 9 \(SIGKILL\); nothing was"
        ),
    ):
        for _ in pool.run(blocks([str(source)], 100)):
            os.kill(pool.process_ids[0], signal.SIGKILL)


def test_a_workers_error_keeps_its_type(tmp_path: Path) -> None:
    (tmp_path / "short").touch()
    short = InputBlock(str(tmp_path / "short"), 0, 10, None, 0)
    with (
        WorkerPool(CleanWork(Cleaner(OPTIONS)), 1) as pool,
        pytest.raises(DataError, match=r"short: ended at byte offset 0 instead of 10"),
    ):
        list(pool.run([short]))
