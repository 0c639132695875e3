"""When a run ends early."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron.errors import ExitCode
from megatron.train.signals import StopSignals
from megatron.train.stop import StopRules, Verdict, kill_switch_is_on, kill_switch_message
from tests.train.samples import control_config


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


def test_only_a_signal_requests_a_requeue() -> None:
    codes = {verdict: verdict.exit_code for verdict in Verdict}
    assert codes.pop(Verdict.SIGNAL) == ExitCode.REQUEUE == 75
    assert set(codes.values()) == {ExitCode.DONE}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_only_sets_a_flag(signals: StopSignals, number: signal.Signals) -> None:
    assert signals.received is None
    os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGTERM)
    assert signals.received == number.name
    rules = StopRules(control_config(), signals)
    assert rules.verdict(3) is Verdict.SIGNAL
    assert rules.message(Verdict.SIGNAL, 3).startswith(f"exiting program at iteration 3 because of {number.name}")


def test_a_rank_without_a_signal_can_still_name_the_reason() -> None:
    message = StopRules(control_config(), StopSignals()).message(Verdict.SIGNAL, 3)
    assert message.startswith("exiting program at iteration 3 because of a signal to another rank")


def test_interval() -> None:
    rules = StopRules(control_config(exit_interval=4), StopSignals())
    assert [step for step in range(1, 10) if rules.verdict(step) is Verdict.INTERVAL] == [4, 8]
    assert rules.message(Verdict.INTERVAL, 4) == "exiting program at iteration 4"


def test_without_stop_conditions_nothing_stops() -> None:
    assert StopRules(control_config(), StopSignals()).verdict(1) is Verdict.CONTINUE


def test_duration_counts_from_the_start_of_the_program() -> None:
    clock = Clock()
    rules = StopRules(control_config(exit_duration_in_mins=2), StopSignals(), started_at=970.0, clock=clock)
    assert rules.verdict(1) is Verdict.CONTINUE
    clock.now = 970.0 + 121.0
    assert rules.verdict(2) is Verdict.DURATION
    assert rules.message(Verdict.DURATION, 2) == f"exiting program after {121 / 60:.2f} minutes"


def test_kill_switch(tmp_path: Path) -> None:
    path = tmp_path / "stop"
    control = control_config(kill_switch_path=str(path))
    rules = StopRules(control, StopSignals())
    assert rules.verdict(1) is Verdict.CONTINUE
    path.touch()
    assert kill_switch_is_on(str(path))
    assert rules.verdict(1) is Verdict.KILL_SWITCH
    assert StopRules(control, StopSignals(), watches_file=False).verdict(1) is Verdict.CONTINUE
    assert (
        rules.message(Verdict.KILL_SWITCH, 1)
        == kill_switch_message(str(path))
        == f"Detected kill switch at {path}. Exiting"
    )


def test_the_most_urgent_reason_applies(tmp_path: Path, signals: StopSignals) -> None:
    rules = StopRules(
        control_config(exit_interval=1, exit_duration_in_mins=1, kill_switch_path=str(tmp_path)),
        signals,
        started_at=0.0,
        clock=lambda: 61.0,
    )
    os.kill(os.getpid(), signal.SIGUSR1)
    assert rules.verdict(1) is Verdict.KILL_SWITCH
    assert max(Verdict.INTERVAL, Verdict.DURATION, Verdict.SIGNAL) is Verdict.SIGNAL
