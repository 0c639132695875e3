"""When a run ends early."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.config import StoppingConfig
from megatron.parallel.mesh import ParallelMesh
from megatron.train.signals import StopSignals
from megatron.train.stop import Stopping, StopRules, StopVerdict, kill_switch_is_on, kill_switch_message


@pytest.fixture
def signals() -> Iterator[StopSignals]:
    """The signals of a run that is in its training loop."""
    with StopSignals().installed() as installed, installed.steps_follow():
        yield installed
        installed.settle()


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_only_sets_a_flag(signals: StopSignals, number: signal.Signals) -> None:
    assert signals.received is None
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == number.name
    rules = StopRules(StoppingConfig(), signals)
    assert rules.verdict(3) is StopVerdict.SIGNAL
    assert rules.message(StopVerdict.SIGNAL, 3).startswith(f"exiting program at iteration 3 because of {number.name}")


def test_a_rank_without_a_signal_can_still_name_the_reason() -> None:
    message = StopRules(StoppingConfig(), StopSignals()).message(StopVerdict.SIGNAL, 3)
    assert message.startswith("exiting program at iteration 3 because of a signal to another rank")


def test_without_stop_conditions_nothing_stops() -> None:
    for config in (StoppingConfig(), StoppingConfig(exit_interval=0)):  # 0 is off in Megatron-LM
        assert StopRules(config, StopSignals()).verdict(1) is StopVerdict.CONTINUE


def test_duration_counts_from_the_start_of_the_program() -> None:
    clock = Clock()
    rules = StopRules(StoppingConfig(exit_duration_in_mins=2), StopSignals(), started_at=970.0, clock=clock)
    assert rules.verdict(1) is StopVerdict.CONTINUE
    clock.now = 970.0 + 121.0
    assert rules.verdict(2) is StopVerdict.DURATION
    assert rules.message(StopVerdict.DURATION, 2) == f"exiting program after {121 / 60:.2f} minutes"


def test_kill_switch(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    control = StoppingConfig(kill_switch_path=str(path))
    rules = StopRules(control, StopSignals())
    assert rules.verdict(1) is StopVerdict.CONTINUE
    path.touch()
    assert kill_switch_is_on(str(path))
    assert rules.verdict(1) is StopVerdict.KILL_SWITCH
    assert StopRules(control, StopSignals(), watches_file=False).verdict(1) is StopVerdict.CONTINUE
    assert (
        rules.message(StopVerdict.KILL_SWITCH, 1)
        == kill_switch_message(str(path))
        == f"Detected kill switch at {path}. Exiting"
    )


def test_the_most_urgent_reason_applies(tmp_path: Path, signals: StopSignals) -> None:
    rules = StopRules(
        StoppingConfig(exit_interval=1, exit_duration_in_mins=1, kill_switch_path=str(tmp_path)),
        signals,
        started_at=0.0,
        clock=lambda: 61.0,
    )
    os.kill(os.getpid(), signal.SIGUSR1)
    assert rules.verdict(1) is StopVerdict.KILL_SWITCH
    assert max(StopVerdict.INTERVAL, StopVerdict.DURATION, StopVerdict.SIGNAL) is StopVerdict.SIGNAL


def agreed(verdicts: dict[int, StopVerdict], steps: range, in_flight: int = 0, last: int = 0) -> dict[int, StopVerdict]:
    """What all ranks, here one, decide after each step."""
    rules: Any = SimpleNamespace(
        verdict=lambda step: verdicts.get(step, StopVerdict.CONTINUE),
        is_interval_over=lambda step: verdicts.get(step) is StopVerdict.INTERVAL,
        signals=StopSignals(),
        message=lambda verdict, step: f"stopped by {verdict.name} at {step}",
    )
    stopping = Stopping(rules, ParallelMesh.single())
    stopping.steps_in_flight = in_flight
    return {step: stopping.decide(step, is_last=step == last) for step in steps}


def test_an_interval_that_names_the_last_step_stops_nothing() -> None:
    for verdict, expected in ((StopVerdict.INTERVAL, StopVerdict.CONTINUE), (StopVerdict.SIGNAL, StopVerdict.SIGNAL)):
        assert agreed({4: verdict}, range(4, 5), last=4) == {4: expected}


def test_a_pending_verdict_takes_effect_one_step_later_and_an_interval_at_once() -> None:
    """On a GPU the host does not wait for the other ranks' verdicts."""
    verdicts = {2: StopVerdict.DURATION, 6: StopVerdict.INTERVAL, 7: StopVerdict.SIGNAL}
    expected = {3: StopVerdict.DURATION, 6: StopVerdict.INTERVAL, 8: StopVerdict.SIGNAL}
    steps = range(1, 9)
    assert agreed(verdicts, steps, 1) == {step: expected.get(step, StopVerdict.CONTINUE) for step in steps}


def test_a_failed_save_ends_the_run_unless_it_stops_for_another_reason() -> None:
    for own, expected in ((None, StopVerdict.FAILED_SAVE), ("/", StopVerdict.KILL_SWITCH)):
        stopping = Stopping(StopRules(StoppingConfig(kill_switch_path=own), StopSignals()), ParallelMesh.single())
        stopping.request(StopVerdict.FAILED_SAVE)
        assert stopping.decide(1) is expected
