"""Validation losses: which samples are seen, and how their losses are averaged."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.config import EvaluationConfig
from megatron.parallel.mesh import ParallelMesh
from megatron.train.callback import Callback, CallbackList, Evaluation
from megatron.train.callbacks.evaluator import Evaluator, mean_loss
from megatron.train.callbacks.step_reports import StepReports
from megatron.train.watchdog import Watch


class FakeRun:
    """A run whose engine answers each global batch with the next (loss sum, token count)."""

    def __init__(self, answers: list[tuple[float, int]]) -> None:
        self.config = SimpleNamespace(
            optim=SimpleNamespace(global_batch_size=4),
            evaluation=EvaluationConfig(),
            data=SimpleNamespace(num_workers=2, seq_length=50),
        )
        self.asked: list[tuple[int, int, int]] = []
        self.reported: list[tuple[Any, ...]] = []
        self.progress = Progress(5, 20, 200)
        self.engine = SimpleNamespace(
            evaluate=lambda batches: next(self._answers), using_averages=contextlib.nullcontext
        )
        report = self.reported.append
        self.report = SimpleNamespace(evaluation=lambda *told: report(told), task=lambda *told: report(told))
        self.open_loaders = 0
        self.most_samples = 100
        self.data = self
        self.watch = Watch()
        self.evaluator = Evaluator(CallbackList(), StepReports())
        self.mesh = ParallelMesh.single()
        self._answers = iter(answers)

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


def test_without_a_counted_token_there_is_no_loss_and_a_warning_once(capsys: pytest.CaptureFixture[str]) -> None:
    assert mean_loss(FakeRun([(0.0, 0)]), range(4), 4) is None
    assert mean_loss(FakeRun([(1.0, 0.25), (0.0, 0.25)]), range(8), 8) == 2.0
    run = FakeRun([(0.0, 0), (0.0, 0), (6.0, 4)] * 2)
    for _ in range(2):
        assert run.evaluator.evaluate(run, "iteration 5") == {"news": None, "code": 1.5}
    assert run.reported[0] == (run.progress, "news", "iteration 5", None)
    assert (run.evaluator.validation_loss(5), run.evaluator.validation_loss(6)) == (1.5, None)
    assert run.evaluator.has_validated(5) and not run.evaluator.has_validated(6)
    assert capsys.readouterr().err.count("the evaluation on news has no loss: none of the tokens of its 8 samples") == 1


def test_nothing_is_reported_of_no_samples() -> None:
    run = FakeRun([])
    run.most_samples = 0
    assert run.evaluator.evaluate(run, "iteration 5") == {}
    assert run.reported == []


def test_every_group_is_reported_under_its_name() -> None:
    run = FakeRun([(4.0, 4), (8.0, 4), (12.0, 4)])
    assert run.evaluator.evaluate(run, "iteration 5") == {"news": 1.5, "code": 3.0}
    assert run.reported == [
        (run.progress, "news", "iteration 5", 1.5),
        (run.progress, "code", "iteration 5", 3.0),
    ]
    assert run.progress == Progress(5, 20, 200)


def test_the_callbacks_follow_every_evaluation() -> None:
    class Following(Callback):
        def at_evaluation(self, run: Any, evaluation: Evaluation) -> None:
            run.reported.append(evaluation)

    run = FakeRun([(4.0, 4), (8.0, 4), (math.inf, 4)])
    evaluator = Evaluator(Following(), StepReports())
    evaluator.evaluate(run, "the end", split="test")
    evaluator.evaluate(run, "iteration 5")
    losses = {"news": 1.5, "code": math.inf}
    followed = [one for one in run.reported if isinstance(one, Evaluation)]
    assert followed == [Evaluation("test", "the end", {}), Evaluation("valid", "iteration 5", losses)]
    assert evaluator.validation_loss(5) is None, "it is not finite"
