"""Early stop conditions: signals, a kill-switch file, a time limit, an interval.

Each rank reaches its own verdict; the loop takes the maximum over all ranks, so that all stop at the same step.

Source: exit paths and texts of bigscience-workshop/Megatron-DeepSpeed, megatron/training.py; upstream has no signal
handling.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from megatron.config import ControlConfig
from megatron.errors import ExitCode
from megatron.train.signals import StopSignals


class Verdict(IntEnum):
    """Whether and why to stop after a step; the maximum over all ranks applies.

    Only a signal means that the job should be requeued (exit code 75). The other reasons are the user's requests and
    give exit code 0, as in upstream; the kill switch ranks highest because it must also end a job that its scheduler
    would requeue. After a failed save the run ends with that failure, unless another reason gives it a last attempt.
    """

    CONTINUE = 0
    FAILED_SAVE = 1
    INTERVAL = 2
    DURATION = 3
    SIGNAL = 4
    KILL_SWITCH = 5

    @property
    def exit_code(self) -> ExitCode:
        """The exit code of a run that stopped for this reason."""
        return ExitCode.REQUEUE if self is Verdict.SIGNAL else ExitCode.DONE


class StopRules:
    """One rank's view of when to stop.

    Args:
        control: the user's limits.
        signals: records signals; without --exit-on-signal it is not installed and stays empty.
        started_at: `clock()` at program start, from which the time limit counts.
        watches_file: whether this rank checks for the kill-switch file; one rank is enough, since verdicts are
            combined.
        clock: a monotonic clock, in seconds.
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
        return Verdict.INTERVAL if self.is_interval_over(step) else Verdict.CONTINUE

    def is_interval_over(self, step: int) -> bool:
        """Whether --exit-interval ends the run after this step; every rank gets the same answer without
        communication.
        """
        return bool(self.control.exit_interval) and step % (self.control.exit_interval or 1) == 0

    def message(self, verdict: Verdict, step: int) -> str:
        """The log line with the reason for stopping; upstream's text where upstream has one."""
        if verdict is Verdict.KILL_SWITCH:
            return kill_switch_message(self.control.kill_switch_path)
        if verdict is Verdict.DURATION:
            return f"exiting program after {self.elapsed_minutes:.2f} minutes"
        if verdict is Verdict.SIGNAL:
            name = self.signals.received or "a signal to another rank"
            return f"exiting program at iteration {step} because of {name}; restart with --load to continue"
        return f"exiting program at iteration {step}"


def kill_switch_is_on(path: str | None) -> bool:
    """Whether the kill-switch file exists; also checked before start-up."""
    return path is not None and Path(path).exists()


def kill_switch_message(path: str | None) -> str:
    """Upstream's kill-switch log line, which users search for."""
    return f"Detected kill switch at {path}. Exiting"
