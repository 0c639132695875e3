"""A disk that is full where a run only records: the run trains on, saves, ends with 0, and says what is missing."""

from __future__ import annotations

import contextlib
import io
import re
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from megatron.checkpoint.recovery import find
from megatron.observe.metrics_file import read_steps
from tests.helpers.machines.faulty_disk import FaultyDisk, faulty_disk
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import TinyCorpus, train_here, write_tiny_corpus

STEPS = 6


class Ended(NamedTuple):
    """How a run ended."""

    code: int
    text: str
    said: str
    operations: int


def failing_wandb(from_step: int) -> SimpleNamespace:
    """A client whose service is lost at some step."""

    def tell(values: Any, step: int) -> None:
        if step >= from_step:
            raise BrokenPipeError(32, "Broken pipe")

    run = SimpleNamespace(
        config=SimpleNamespace(update=lambda *words, **more: None), log=tell, finish=lambda: tell({}, 99)
    )
    return SimpleNamespace(init=lambda **settings: run)


def train_on(rank: int, runs: list[tuple[list[str], str, int | None]]) -> list[Ended]:
    """Trains each command line where the disk of its folder is full from its operation on."""
    sys.modules["wandb"] = failing_wandb(4)  # type: ignore[assignment]
    threading.excepthook = lambda failure: None  # TensorBoard's thread dies with a traceback
    found = []
    for flags, folder, fail_at in runs:
        disk = FaultyDisk(Path(folder), fail_at, is_full=True)
        with contextlib.redirect_stderr(io.StringIO()) as said, faulty_disk(disk):
            code, text = train_here(rank, flags)
        found.append(Ended(code, text, said.getvalue(), disk.operations))
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TinyCorpus:
    return write_tiny_corpus(tmp_path_factory.mktemp("corpus"))


def flags_of(corpus: TinyCorpus, folder: Path, **changes: Any) -> list[str]:
    recorded = folder / "recorded"
    settings = {
        "run_dir": recorded / "run", "tensorboard_dir": recorded / "tensorboard", "wandb_project": "toys",
        "train_iters": STEPS, "save_interval": STEPS, "eval_interval": 3, "eval_iters": 1, "log_interval": 2,
    }  # fmt: skip
    return corpus.flags(folder=folder, **{**settings, **changes})


@pytest.mark.full
def test_training_goes_on_whenever_the_disk_fills_up(tmp_path: Path, corpus: TinyCorpus) -> None:
    def run_all(places: list[int | None], **changes: Any) -> dict[int | None, Ended]:
        runs = [
            (flags_of(corpus, folder, **changes), str(folder / "recorded"), place)
            for place in places
            for folder in [tmp_path / f"at{place}"]
        ]
        return dict(zip(places, run_ranks(train_on, 1, runs)[0], strict=True))

    whole = run_all([None])[None]
    assert whole.code == 0, whole
    every = max(1, whole.operations // 12)
    # a place that came twice would continue its own run
    ended = run_all(sorted({*range(0, whole.operations, every), whole.operations - 1}))
    went_on = {place: run for place, run in ended.items() if run.code == 0}
    for place, run in ended.items():
        if run.code != 0:
            assert place < min(went_on), "an error although training had begun"
            assert run.code == 74 and "recorded" in run.text and "No space left on device" in run.text, run
    assert len(went_on) >= 8
    for place, run in went_on.items():
        folder = tmp_path / f"at{place}"
        assert [found.step for found in find(folder / "checkpoints")] == [STEPS]
        last_lines = run.said.splitlines()[-4:]
        assert "project toys: records of steps 4 to 6 are missing (Broken pipe)." in "".join(last_lines)
        if run.operations > place:  # a run may have an operation or two less than the first of its process
            assert any(" are missing" in line and "(No space left on device)" in line for line in last_lines), run.said
        missing = sorted(set(range(1, STEPS + 1)) - set(read_steps(folder / "recorded" / "run")))
        if missing:
            # The record that did not fit may be the evaluation after the step before, or the start's.
            first = f"({min(missing)}|{min(missing) - 1}|0)"
            text = f"metrics.jsonl: records of steps {first} to {STEPS} are missing .No space left on device"
            assert re.search(text, "".join(last_lines)), (missing, last_lines)
    place = min(went_on)
    (resumed,) = run_ranks(train_on, 1, [(flags_of(corpus, tmp_path / f"at{place}", train_iters=10), "/none", None)])[0]
    assert resumed.code == 0, resumed
    assert sorted(read_steps(tmp_path / f"at{place}" / "recorded" / "run"))[-2:] == [9, 10]
