"""Running a task: agreement on files, progress, results."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from tests.trident.evaluate.fakes import ByteTokenizer, FakeScorer
from trident.evaluate.baselines import Baselines
from trident.evaluate.statistics import Estimate
from trident.evaluate.tasks.lambada import Lambada
from trident.evaluate.tasks.task import MOST_SHOWN_LETTERS, TaskMeasurement, TaskOptions, result_of, shown_end

BYTES = ByteTokenizer()


def test_files_are_read_under_agreement_and_progress_is_reported(tmp_path: Path) -> None:
    (tmp_path / "items.jsonl").write_text('{"text": "a b"}\n{"text": "c d"}\n')
    calls: list[str] = []
    seen: list[tuple[int, int]] = []

    def agree(work: Callable[[], Any]) -> Any:
        calls.append("agreed")
        return work()

    options = TaskOptions(
        baselines=Baselines(BYTES), agree=agree, on_progress=lambda done, total: seen.append((done, total))
    )
    Lambada(data="items.jsonl", folder=tmp_path).run(FakeScorer(), BYTES, None, options)
    assert calls == ["agreed", "agreed"] and seen == [(1, 2), (2, 2)]


def test_another_ranks_failure_ends_the_task_before_anything_is_scored(tmp_path: Path) -> None:
    def agree(work: Callable[[], Any]) -> Any:
        raise DataError("rank 1: items.jsonl cannot be read")

    scorer = FakeScorer()
    with pytest.raises(DataError, match="rank 1: items"):
        Lambada(data="items.jsonl", folder=tmp_path).run(scorer, BYTES, None, TaskOptions(agree=agree))
    assert not scorer.asked


def test_a_result_leaves_out_errors_that_are_not_known() -> None:
    task = Lambada(data="set/items.jsonl")
    measured = TaskMeasurement({"acc": Estimate(0.5, 0.1), "ppl": Estimate(3.0, None)})
    result = result_of(task, measured, 7, {"uniform": TaskMeasurement({"acc": Estimate(0.1, None)})}, ("a note",))
    assert (result.name, result.kind, result.count, result.notes) == ("lambada:items", "lambada", 7, ("a note",))
    assert result.figures == {"acc": 0.5, "ppl": 3.0} and result.errors == {"acc": 0.1}
    assert result.baselines == {"uniform": {"acc": 0.1}} and result.baseline_errors == {"uniform": {}}


def test_a_task_has_the_name_it_was_given_and_paths_relative_to_its_file() -> None:
    task = Lambada(name="mine", data="items.jsonl", train="train.txt", folder=Path("folder"))
    assert task.title == "mine"
    assert (task.path, task.train_path) == (Path("folder/items.jsonl"), Path("folder/train.txt"))
    assert Lambada(data="/items.jsonl", folder=Path("folder")).path == Path("/items.jsonl")


def test_of_a_long_context_the_end_is_shown() -> None:
    assert shown_end("short") == "short"
    shown = shown_end("a" * 1000 + "end")
    assert shown.startswith("...a") and shown.endswith("end") and len(shown) == MOST_SHOWN_LETTERS + 3
