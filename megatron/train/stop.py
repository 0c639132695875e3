"""When to end a run early: signals, a kill-switch file, a time limit, an interval.

Each rank forms its own verdict; the loop takes the largest over all ranks, so that all stop at the same step. A signal
handler only sets a flag: nothing is saved, printed or torn down inside it, so further signals are harmless.

Source: exit paths and texts of bigscience-workshop/Megatron-DeepSpeed, megatron/training.py; upstream has no signal
handling.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path
from types import FrameType
from typing import Any

from megatron.config import ControlConfig
from megatron.errors import ExitCode

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Verdict(IntEnum):
    """What a rank thinks should happen after a step; where ranks differ, the largest holds for all.

    Only a signal means "queue me again" (exit code 75). The others were asked for by the user and end with 0, as
    upstream's do; the kill switch is the largest, because it must also end a job that its scheduler would start again.
    """

    GO_ON = 0
    INTERVAL = 1
    DURATION = 2
    SIGNAL = 3
    KILL_SWITCH = 4

    @property
    def exit_code(self) -> ExitCode:
        """The code a run ends with that stopped for this reason."""
        return ExitCode.REQUEUE if self is Verdict.SIGNAL else ExitCode.DONE


class StopSignals:
    """Remembers that SIGTERM or SIGUSR1 arrived.

    `install` and `restore` belong in the main thread, around the run.
    """

    def __init__(self) -> None:
        self._received: int | None = None
        self._former: dict[int, Any] = {}

    @property
    def received(self) -> str | None:
        """Name of the first stop signal that arrived, None so far."""
        return None if self._received is None else signal.Signals(self._received).name

    def install(self) -> StopSignals:
        """Starts to listen; installing twice changes nothing."""
        for number in STOP_SIGNALS:
            if number not in self._former:
                self._former[number] = signal.signal(number, self._note)
        return self

    def restore(self) -> None:
        """Puts back what happened on these signals before `install`."""
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number


class StopRules:
    """One rank's view of when to stop.

    Args:
        control: the limits that the user set.
        signals: where signals are noted; without --exit-on-signal it is not installed and stays empty.
        started_at: `clock()` when the program started; the time limit counts from there.
        watches_file: whether this rank looks for the kill-switch file; one rank is enough, since the verdicts are
            joined.
        clock: seconds of a clock that never goes back.
    """

    def __init__(
        self,
        control: ControlConfig,
        signals: StopSignals,
        *,
        started_at: float | None = None,
        watches_file: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.control = control
        self.signals = signals
        self.watches_file = watches_file
        self._clock = clock
        self._started_at = clock() if started_at is None else started_at

    @property
    def elapsed_minutes(self) -> float:
        """Minutes since the program started."""
        return (self._clock() - self._started_at) / 60.0

    def verdict(self, step: int) -> Verdict:
        """This rank's verdict after a step; the caller takes the maximum over all ranks."""
        if self.watches_file and kill_switch_is_on(self.control.kill_switch_path):
            return Verdict.KILL_SWITCH
        if self.signals.received:
            return Verdict.SIGNAL
        limit = self.control.exit_duration_in_mins
        if limit is not None and self.elapsed_minutes > limit:
            return Verdict.DURATION
        return Verdict.INTERVAL if self.is_interval_over(step) else Verdict.GO_ON

    def is_interval_over(self, step: int) -> bool:
        """Whether --exit-interval ends the run after this step, which every rank knows without asking the others."""
        return bool(self.control.exit_interval) and step % (self.control.exit_interval or 1) == 0

    def message(self, verdict: Verdict, step: int) -> str:
        """The line that says why the run ends; upstream's words where upstream has them."""
        if verdict is Verdict.KILL_SWITCH:
            return kill_switch_message(self.control.kill_switch_path)
        if verdict is Verdict.DURATION:
            return f"exiting program after {self.elapsed_minutes:.2f} minutes"
        if verdict is Verdict.SIGNAL:
            name = self.signals.received or "a signal to another rank"
            return f"exiting program at iteration {step} because of {name}; start it again with --load to go on"
        return f"exiting program at iteration {step}"


def kill_switch_is_on(path: str | None) -> bool:
    """Whether the kill-switch file exists; also looked at before start-up."""
    return path is not None and Path(path).exists()


def kill_switch_message(path: str | None) -> str:
    """The line upstream's users search for."""
    return f"Detected kill switch at {path}. Exiting"
