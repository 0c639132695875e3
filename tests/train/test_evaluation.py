"""Validation losses: which samples are seen, and how their losses are averaged."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.train.evaluation import evaluate, mean_loss
from megatron.train.watchdog import Watch
from tests.train.samples import control_config


class FakeRun:
    """A run whose engine answers each global batch with the next (loss sum, token count)."""

    def __init__(self, answers: list[tuple[float, int]]) -> None:
        self.config = SimpleNamespace(
            optim=SimpleNamespace(global_batch_size=4),
            control=control_config(),
            data=SimpleNamespace(num_workers=2, seq_length=50),
        )
        self.asked: list[tuple[int, int, int]] = []
        self.reported: list[tuple[Any, ...]] = []
        self.progress = Progress(5, 20, 200)
        self.lengths: list[int] = []
        self.engine = SimpleNamespace(
            evaluate=lambda batches: next(self._answers), expect_length=lambda length: self.lengths.append(length)
        )
        report = self.reported.append
        self.report = SimpleNamespace(evaluation=lambda *told: report(told), task=lambda *told: report(told))
        self.open_loaders = 0
        self.most_samples = 100
        self.watch = Watch()
        self.tasks: tuple[Any, ...] = ()
        self.prompts = None
        self._answers = iter(answers)

    def scorer(self) -> str:
        return "the scorer"

    @contextlib.contextmanager
    def loader(self, dataset: Any) -> Iterator[Any]:
        self.open_loaders += 1
        yield SimpleNamespace(micro_batches=lambda *wanted: self.asked.append(wanted))
        self.open_loaders -= 1

    def evaluation_samples(self, split: str, name: str) -> int:
        return min(self.most_samples, len(self.evaluation_datasets(split)[name]))

    def evaluation_datasets(self, split: str) -> dict[str, range]:
        return {"valid": {"news": range(8), "code": range(4)}, "test": {}}[split]


def test_losses_are_weighted_by_tokens_not_by_batches() -> None:
    run = FakeRun([(10.0, 10), (90.0, 30)])
    assert mean_loss(run, range(8), 8) == 2.5
    assert run.lengths == [50], "a curriculum's shorter samples are for training only"


@pytest.mark.parametrize(
    ("count", "asked"),
    [
        (8, [(0, 4, 8), (4, 4, 8)]),
        (9, [(0, 4, 9), (4, 4, 9), (8, 4, 9)]),
        (3, [(0, 4, 3)]),
        (0, []),
    ],
)
def test_the_first_samples_are_used_and_a_partial_batch_counts(count: int, asked: list) -> None:
    run = FakeRun([(1.0, 1)] * 3)
    mean_loss(run, range(100), count)
    assert run.asked == asked
    assert run.open_loaders == 0


def test_the_same_samples_every_time() -> None:
    run = FakeRun([(1.0, 1)] * 4)
    mean_loss(run, range(8), 8)
    mean_loss(run, range(8), 8)
    assert run.asked[:2] == run.asked[2:]


def test_zero_counted_tokens_do_not_divide_by_zero() -> None:
    assert mean_loss(FakeRun([(0.0, 0)]), range(4), 4) == 0.0


def test_nothing_is_reported_of_no_samples() -> None:
    run = FakeRun([])
    run.most_samples = 0
    assert evaluate(run, "iteration 5") == {}
    assert run.reported == []


def test_every_group_is_reported_under_its_name() -> None:
    run = FakeRun([(4.0, 4), (8.0, 4), (12.0, 4)])
    assert evaluate(run, "iteration 5") == {"news": 1.5, "code": 3.0}
    assert run.reported == [
        (run.progress, "news", "iteration 5", 1.5),
        (run.progress, "code", "iteration 5", 3.0),
    ]
    assert run.progress == Progress(5, 20, 200)


def test_a_split_without_data_reports_nothing() -> None:
    run = FakeRun([])
    assert evaluate(run, "the end", split="test") == {}
    assert run.reported == []


def test_tasks_run_with_the_validation_split_only() -> None:
    run = FakeRun([])
    run.evaluation_datasets = lambda split: {}  # type: ignore[method-assign]
    run.tasks = (SimpleNamespace(run=lambda scorer: f"measured by {scorer}"),)
    assert evaluate(run, "the end", split="test") == {}
    assert run.reported == []
    assert evaluate(run, "iteration 5") == {}
    assert run.reported == [(run.progress, "iteration 5", "measured by the scorer")]
