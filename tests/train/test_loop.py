"""The order of events in a run, seen by parts that only write down when they are called."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.config.sections.safety import SafetyConfig
from megatron.device import Elapsed
from megatron.engine.deepspeed_setup import TRANSFER
from megatron.errors import ExitCode, NumericsError
from megatron.observe.profiling.step_profiler import StepProfiler
from megatron.observe.speed.waits import Waits
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.train import loop
from megatron.train.loop import run_to_end
from megatron.train.restarts.history import History
from megatron.train.signals import StopSignals
from megatron.train.stop import Verdict
from megatron.train.watchdog import Watch
from tests.train.samples import Outcome, control_config, optim_config


class FakeRun:
    """A run of three steps whose parts note their calls in `events`."""

    def __init__(self, *, train_iters: int = 3, outcome: Outcome | None = None, **control: Any) -> None:
        self.events: list[Any] = []
        self.history = History()
        self.outcome = outcome or Outcome()
        self.verdicts: dict[int, Verdict] = {}
        self.config = SimpleNamespace(
            control=control_config(**{"eval_interval": 2, **control}),
            optim=optim_config(train_iters=train_iters, lr=1.0, lr_decay_style="constant"),
            data=SimpleNamespace(seq_length=10),
            safety=SafetyConfig(),
        )
        self.progress = Progress()
        self.epoch_ends: set[int] = set()
        self.validation: tuple[int, float] | None = None
        self.steps_in_flight = 0
        self.history = History()
        self.mesh = ParallelMesh.single()
        self.waits: list[Waits] = []
        self.messages: list[Elapsed] = []
        self.profiler = StepProfiler.idle()
        self.activity = SimpleNamespace(stopping=lambda reason: self.events.append(reason))
        self.engine = SimpleNamespace(train_batch=self._train, expect_length=lambda length: None)
        self.next_length = 10
        self.watch = Watch()
        self.report = SimpleNamespace(
            started=lambda progress: self.events.append(("started", progress.step)),
            step=self._report,
            flush=lambda: self.events.append("flush"),
        )
        self.rules = SimpleNamespace(
            message=lambda verdict, step: f"stopped by {verdict.name} at {step}", signals=StopSignals()
        )

    def _report(
        self, progress: Progress, step: Outcome, rate: float, seconds: float, waits: Waits, sample_tokens: int
    ) -> None:
        assert sample_tokens == self.next_length
        self.events.append(("report", progress.step))
        self.waits.append(waits)

    def end_distillation(self) -> None:
        """This run has no teacher."""

    def take_messages(self) -> Elapsed | None:
        return self.messages.pop(0) if self.messages else None

    def _train(self, batches: Any, rate: float, weight_decay: float) -> Outcome:
        assert weight_decay == self.config.optim.weight_decay
        self.events.append(("train", batches, rate))
        return self.outcome

    @property
    def is_done(self) -> bool:
        return self.progress.step >= self.config.optim.train_iters

    def completed_epoch(self, consumed_before: int) -> bool:
        return self.progress.step in self.epoch_ends

    def skip_data_ranges(self) -> None:
        self.events.append("skip")

    def train_batches(self) -> str:
        return f"from {self.progress.consumed_samples}"

    def is_due(self, interval: int | None) -> bool:
        return bool(interval) and self.progress.step % interval == 0

    def should_stop(self) -> Verdict:
        self.events.append(("ask", self.progress.step))
        return self.verdicts.get(self.progress.step, Verdict.CONTINUE)


@pytest.fixture(autouse=True)
def noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Evaluating and saving write themselves down, too."""

    def evaluate(run: FakeRun, prefix: str, *, split: str = "valid") -> None:
        run.events.append(("evaluate", prefix, split))

    def save_run(run: FakeRun, *, must_succeed: bool = False) -> None:
        run.events.append(("save", run.progress.step, must_succeed))

    monkeypatch.setattr(loop, "evaluate", evaluate)
    monkeypatch.setattr(loop, "hear_of_save", lambda run: None)
    monkeypatch.setattr(loop, "save_run", save_run)
    monkeypatch.setattr(loop, "hear_of_save", lambda run: None)


def one_step(step: int) -> list[Any]:
    return ["skip", ("train", f"from {8 * (step - 1)}", 1.0), ("report", step)]


END = [
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


def test_the_messages_of_a_step_are_those_since_it_began() -> None:
    run = FakeRun(train_iters=1, eval_interval=100)
    before, during = Elapsed(), Elapsed()
    before.parts.append(("", 0.0, 100.0))
    during.parts += [("", 1.0, 1.5), (TRANSFER, 2.0, 2.25)]
    run.messages = [before, during]
    run_to_end(run)
    (waits,) = run.waits
    assert waits.communication_seconds == 0.75 and waits.transfer_seconds is None  # there is one stage
    assert waits.data_seconds is not None and waits.memory_bytes is not None and waits.memory_bytes > 2**20
    run = FakeRun(train_iters=1, eval_interval=100)
    run.mesh = ParallelMesh.at(standard_axes(2, pp=2), 0)
    run.messages = [before, during]
    run_to_end(run)
    assert run.waits[0].transfer_seconds == 0.25
    run = FakeRun(train_iters=1, eval_interval=100)
    run_to_end(run)
    assert run.waits[0].communication_seconds is None  # one rank sends nothing


def test_an_epoch_ends_with_an_evaluation_and_a_checkpoint_if_asked() -> None:
    for asked in (True, False):
        settings = {"eval_each_epoch": asked, "save_each_epoch": asked, "eval_interval": 100}
        run = FakeRun(save="checkpoints", save_interval=100, **settings)
        run.epoch_ends = {1}
        assert run_to_end(run) is ExitCode.DONE
        found = [event for event in run.events if event[0] in ("evaluate", "save")]
        at_the_end = [("evaluate", "iteration 1", "valid"), ("save", 1, False)] if asked else []
        assert found == [*at_the_end, *END]


def test_the_last_epoch_is_evaluated_once() -> None:
    run = FakeRun(eval_each_epoch=True)
    run.validation = (3, 1.0)
    run_to_end(run)
    assert ("evaluate", "the end of training for val data", "valid") not in run.events
    assert run.events[-1] == ("evaluate", "the end of training for test data", "test")


@pytest.mark.parametrize(
    ("verdict", "code"),
    [
        (Verdict.SIGNAL, ExitCode.REQUEUE),
        (Verdict.INTERVAL, ExitCode.DONE),
        (Verdict.DURATION, ExitCode.DONE),
        (Verdict.KILL_SWITCH, ExitCode.DONE),
    ],
)
def test_a_stop_saves_and_returns_its_exit_code(
    verdict: Verdict, code: ExitCode, capsys: pytest.CaptureFixture[str]
) -> None:
    run, message = FakeRun(), f"stopped by {verdict.name} at 1"
    run.verdicts[1] = verdict
    assert run_to_end(run) is code
    assert run.events == [("started", 0), *one_step(1), ("ask", 1), ("save", 1, True), "flush", message]
    assert capsys.readouterr().out == f"{message}\n"


def test_a_finished_run_trains_no_more_steps() -> None:
    run = FakeRun()
    run.progress = Progress(3, 24, 240)
    assert run_to_end(run) is ExitCode.DONE
    assert run.events == [("started", 3), *END]


def test_a_run_whose_start_the_kill_switch_prevented() -> None:
    assert run_to_end(None) is ExitCode.DONE


def test_evaluating_only() -> None:
    run = FakeRun(eval_only=True)
    run.progress = Progress(7, 56, 560)
    assert run_to_end(run) is ExitCode.DONE
    assert run.events == [("evaluate", "iteration 7", "valid"), ("evaluate", "iteration 7", "test")]


def test_a_skipped_step_is_counted_and_consumes_its_samples() -> None:
    run = FakeRun(outcome=Outcome(skipped=True))
    run_to_end(run)
    assert run.progress == Progress(3, 24, 240, skipped_steps=3)


def test_a_bad_step_ends_the_run_unsaved() -> None:
    run = FakeRun(outcome=Outcome(loss=math.nan, bad_in_a_row=1), save="checkpoints", save_interval=1)
    with pytest.raises(NumericsError, match="iteration 1: loss nan"):
        run_to_end(run)
    assert run.events == [("started", 0), *one_step(1)]


def test_a_save_waits_for_a_good_step() -> None:
    run = FakeRun(train_iters=4, save="checkpoints", save_interval=2, eval_interval=100)
    run.config.safety = SafetyConfig(max_bad_steps=1)
    outcomes = iter([Outcome(), Outcome(loss=math.nan, bad_in_a_row=1), Outcome(), Outcome()])
    run.engine.train_batch = lambda *given: next(outcomes)
    assert run_to_end(run) is ExitCode.DONE
    assert [event[1] for event in run.events if event[0] == "save"] == [3, 4, 4]
    assert run.progress == Progress(4, 32, 320, bad_steps=1)


def test_copies_are_compared_at_their_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    run = FakeRun(train_iters=5)
    run.config.safety = SafetyConfig(check_replicas_interval=2)
    compared: list[int] = []
    monkeypatch.setattr(loop, "check_replicas", lambda run: compared.append(run.progress.step))
    run_to_end(run)
    assert compared == [2, 4]


def test_pending_metrics_are_reported_one_step_later_but_before_saving() -> None:
    """On a GPU the host does not wait for a step's metrics; an evaluation, a save and the end do."""
    run = FakeRun(train_iters=4, save="checkpoints", save_interval=3, eval_interval=100)
    run.steps_in_flight = 1
    run_to_end(run)
    names = [
        event if isinstance(event, str) else event[:2] if event[0] in ("report", "save") else event[0]
        for event in run.events
    ]
    assert names == [
        "started",
        *("skip", "train", "ask"),
        *("skip", "train", ("report", 1), "ask"),
        *("skip", "train", ("report", 2), ("report", 3), ("save", 3), "ask"),
        *("skip", "train", "ask"),
        *(("report", 4), ("save", 4), "evaluate", "evaluate"),
    ]


def test_a_non_finite_pending_step_is_detected_before_the_save() -> None:
    run = FakeRun(
        outcome=Outcome(loss=math.nan, bad_in_a_row=1), save="checkpoints", save_interval=1, eval_interval=100
    )
    run.steps_in_flight = 1
    with pytest.raises(NumericsError, match="iteration 1: loss nan"):
        run_to_end(run)
    assert not any(event[0] == "save" for event in run.events)
