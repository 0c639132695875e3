"""The order of events in a run, of which evaluations and saves are only written down."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.config.sections.computation import PrecisionConfig
from megatron.config.sections.safety import SafetyConfig
from megatron.errors import ExitCode, NumericsError
from megatron.objective.metric import Metric
from megatron.parallel.mesh import ParallelMesh
from megatron.train import loop
from megatron.train.callback import Callback, CallbackList
from megatron.train.callbacks.evaluator import Evaluator
from megatron.train.callbacks.saving import Saving
from megatron.train.callbacks.step_reports import StepReports
from megatron.train.restarts.identity import RunIdentity
from megatron.train.signals import StopSignals
from megatron.train.stop import Stopping, StopVerdict
from tests.train.samples import Outcome, optim_config, run_config


class Noting(Callback):
    """Notes when each step of a run begins, and when no step follows."""

    def __init__(self, events: list[Any]) -> None:
        self.events = events

    def before_step(self, run: Any) -> None:
        self.events.append("begin")

    def trained(self, run: Any) -> None:
        self.events.append("trained")


class NotedEvaluator(Evaluator):
    """Notes which evaluations are due."""

    def evaluate(self, run: Any, prefix: str, *, split: str = "valid") -> Mapping[str, float | None]:
        run.events.append(("evaluate", prefix, split))
        return run.evaluated

    def has_validated(self, step: int) -> bool:
        return step == self.validated_step

    validated_step: int | None = None


class NotedSaving(Saving):
    """Notes which saves are due."""

    def save(self, run: Any, *, must_succeed: bool = False) -> None:
        run.events.append(("save", run.progress.step, must_succeed))


def run_to_end(run: FakeRun) -> ExitCode:
    """Runs the loop with the callbacks that every run has."""
    reports, noting = StepReports(), Noting(run.events)
    evaluator = NotedEvaluator(noting, reports)
    evaluator.validated_step = run.validated_step
    saving = NotedSaving(RunIdentity(), noting, reports, evaluator)
    typed: Any = run
    return loop.run_to_end(typed, CallbackList((reports, noting, evaluator, saving)))


class FakeRun:
    """A run of three steps that notes what happens to it in `events`."""

    def __init__(
        self, *, train_iters: int = 3, outcome: Outcome | None = None, epoch_samples: int | None = None, **flags: Any
    ) -> None:
        self.events: list[Any] = []
        self.outcome = outcome or Outcome()
        self.verdicts: dict[int, StopVerdict] = {}
        asked = run_config(**{"eval_interval": 2, **flags})
        self.config = SimpleNamespace(
            evaluation=asked.evaluation,
            saving=asked.saving,
            optim=optim_config(train_iters=train_iters, train_tokens=epoch_samples, lr_decay_style="constant"),
            finetuning=SimpleNamespace(epochs=1 if epoch_samples else None),
            data=SimpleNamespace(seq_length=10),
            report=asked.report,
            safety=SafetyConfig(),
            precision=PrecisionConfig(fp16=True),
        )
        self.progress = Progress()
        self.evaluated: dict[str, float | None] = {}
        self.validated_step: int | None = None
        self.mesh = ParallelMesh.single()
        self.waits: list[dict[str, Any]] = []
        self.gate = SimpleNamespace(in_bad_streak=False)
        self.engine = SimpleNamespace(train_batch=self._train, gate=self.gate, update_count=0)
        self.next_length = 10
        self.report = SimpleNamespace(
            started=lambda progress: self.events.append(("started", progress.step)),
            step=self._report,
            flush=lambda: self.events.append("flush"),
        )
        self.stopping = Stopping(self._rules(), self.mesh)

    def _rules(self) -> Any:
        """Stop rules with a verdict for some steps."""
        return SimpleNamespace(
            verdict=self._verdict,
            message=lambda verdict, step: f"stopped by {verdict.name} at {step}",
            signals=StopSignals(),
            is_interval_over=lambda step: False,
        )

    def _report(self, progress: Progress, step: Outcome, rate: float, seconds: float, metrics: list[Metric]) -> None:
        self.events.append(("report", progress.step))
        self.waits.append({metric.name: metric.value for metric in metrics})

    def _train(self, batches: Any, rate: float, weight_decay: float) -> Outcome:
        assert weight_decay == self.config.optim.weight_decay
        self.events.append(("train", batches, rate))
        return self.outcome

    @property
    def is_done(self) -> bool:
        return self.progress.step >= self.config.optim.train_iters

    def train_batches(self) -> str:
        return f"from {self.progress.consumed_samples}"

    def is_due(self, interval: int | None) -> bool:
        return bool(interval) and self.progress.step % interval == 0

    def _verdict(self, step: int) -> StopVerdict:
        self.events.append(("ask", step))
        return self.verdicts.get(step, StopVerdict.CONTINUE)


def one_step(step: int) -> list[Any]:
    return ["begin", ("train", f"from {8 * (step - 1)}", 1.0), ("report", step)]


END = [
    "trained",
    ("save", 3, True),
    ("evaluate", "the end of training for val data", "valid"),
    ("evaluate", "the end of training for test data", "test"),
]


def test_a_whole_run_in_order() -> None:
    run = FakeRun(save="checkpoints", save_interval=2)
    assert run_to_end(run) is ExitCode.DONE
    assert run.events == [
        ("started", 0),
        *one_step(1),
        ("ask", 1),
        *one_step(2),
        ("evaluate", "iteration 2", "valid"),
        ("save", 2, False),
        ("ask", 2),
        *one_step(3),
        ("ask", 3),
        *END,
    ]
    assert run.progress == Progress(3, 24, 240)


def test_an_epoch_ends_with_an_evaluation_and_a_checkpoint_if_asked() -> None:
    for asked in (True, False):
        settings = {"eval_each_epoch": asked, "save_each_epoch": asked, "eval_interval": 100}
        run = FakeRun(save="checkpoints", save_interval=100, epoch_samples=16, **settings)
        assert run_to_end(run) is ExitCode.DONE
        seen = [event for event in run.events if event[0] in ("evaluate", "save")]
        at_the_end = [("evaluate", "iteration 2", "valid"), ("save", 2, False)] if asked else []
        assert seen == [*at_the_end, *(event for event in END if event != "trained")]


def test_the_last_epoch_is_evaluated_once() -> None:
    run = FakeRun(eval_each_epoch=True)
    run.validated_step = 3
    run_to_end(run)
    assert ("evaluate", "the end of training for val data", "valid") not in run.events
    assert run.events[-1] == ("evaluate", "the end of training for test data", "test")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (StopVerdict.SIGNAL, ExitCode.REQUEUE),
        (StopVerdict.INTERVAL, ExitCode.DONE),
        (StopVerdict.DURATION, ExitCode.DONE),
        (StopVerdict.KILL_SWITCH, ExitCode.DONE),
    ],
)
def test_a_stop_saves_and_returns_its_exit_code(
    verdict: StopVerdict, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    run, message = FakeRun(), f"stopped by {verdict.name} at 1"
    run.verdicts[1] = verdict
    assert run_to_end(run) is code
    assert run.events == [("started", 0), *one_step(1), ("ask", 1), "trained", ("save", 1, True), "flush"]
    assert (run.stopping.verdict, run.stopping.reason) == (verdict, message)
    assert capsys.readouterr().out == f"{message}\n"


def test_an_exit_interval_that_names_the_last_step_finishes_the_run() -> None:
    stopped, whole = FakeRun(), FakeRun()
    stopped.verdicts = {3: StopVerdict.INTERVAL}
    assert run_to_end(stopped) is run_to_end(whole) is ExitCode.DONE
    assert stopped.events == whole.events


def test_a_finished_run_trains_no_more_steps() -> None:
    run = FakeRun()
    run.progress = Progress(3, 24, 240)
    assert run_to_end(run) is ExitCode.DONE
    assert run.events == [("started", 3), *END]


def test_evaluating_only() -> None:
    run = FakeRun(eval_only=True)
    run.progress = Progress(7, 56, 560)
    assert run_to_end(run) is ExitCode.DONE
    assert run.events == [("evaluate", "iteration 7", "valid"), ("evaluate", "iteration 7", "test")]


def test_a_save_waits_for_a_good_step() -> None:
    run = FakeRun(train_iters=4, save="checkpoints", save_interval=2, eval_interval=100)
    run.config.safety = SafetyConfig(max_bad_steps=1)
    outcomes = iter([Outcome(), Outcome(loss=math.nan, consecutive_bad=1), Outcome(), Outcome()])

    def train_batch(*given: Any) -> Outcome:
        outcome = next(outcomes)
        run.gate.in_bad_streak = outcome.consecutive_bad > 0
        return outcome

    run.engine.train_batch = train_batch
    assert run_to_end(run) is ExitCode.DONE
    assert [event[1] for event in run.events if event[0] == "save"] == [3, 4, 4]
    assert run.progress == Progress(4, 32, 320, bad_steps=1)


def test_pending_metrics_are_reported_one_step_later_but_before_saving() -> None:
    """On a GPU the host does not wait for a step's metrics; an evaluation, a save and the end do."""
    run = FakeRun(train_iters=4, save="checkpoints", save_interval=3, eval_interval=100)
    run.stopping.steps_in_flight = 1
    run_to_end(run)
    names = [
        event if isinstance(event, str) else event[:2] if event[0] in ("report", "save") else event[0]
        for event in run.events
    ]
    assert names == [
        "started",
        *("begin", "train", "ask"),
        *("begin", "train", ("report", 1), "ask"),
        *("begin", "train", ("report", 2), ("report", 3), ("save", 3), "ask"),
        *("begin", "train", "ask"),
        *(("report", 4), "trained", ("save", 4), "evaluate", "evaluate"),
    ]


def test_a_non_finite_pending_step_is_detected_before_the_save() -> None:
    run = FakeRun(
        outcome=Outcome(loss=math.nan, consecutive_bad=1), save="checkpoints", save_interval=1, eval_interval=100
    )
    run.stopping.steps_in_flight = 1
    with pytest.raises(NumericsError, match="iteration 1: loss nan"):
        run_to_end(run)
    assert not any(event[0] == "save" for event in run.events)
