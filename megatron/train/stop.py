"""Early stop conditions: signals, a kill-switch file, a time limit, an interval.

Each rank has a verdict; the loop takes the maximum over all ranks, so that all stop at the same step.

Source: exit paths and texts of bigscience-workshop/Megatron-DeepSpeed, megatron/training.py; upstream has no signal
handling.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from pathlib import Path

from megatron.config import StoppingConfig
from megatron.errors import ExitCode
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import PendingMaximum
from megatron.train.signals import SignalTarget, StopSignals


class StopVerdict(IntEnum):
    """The decision to stop after a step, by ascending priority; the maximum over all ranks applies.

    Only a signal requests requeuing of the job (exit code 75). The other reasons are user requests with exit code 0, as
    in upstream; the kill switch has the highest priority, since it must also end a job that its scheduler would
    requeue. After a failed save the run ends with that failure, unless another reason allows a last attempt.
    """

    CONTINUE = 0
    FAILED_SAVE = 1
    INTERVAL = 2
    DURATION = 3
    SIGNAL = 4
    KILL_SWITCH = 5

    @property
    def exit_code(self) -> ExitCode:
        return ExitCode.REQUEUE if self is StopVerdict.SIGNAL else ExitCode.DONE


class StopRules:
    """The stop conditions as evaluated by one rank.

    Args:
        stopping: the user's limits.
        signals: stop signals; not installed without --exit-on-signal.
        started_at: `clock()` at program start, for the time limit.
        watches_file: this rank checks for the kill-switch file; one rank is enough, since verdicts are combined.
        clock: a monotonic clock, in seconds.
    """

    def __init__(
        self,
        stopping: StoppingConfig,
        signals: StopSignals,
        *,
        started_at: float | None = None,
        watches_file: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stopping = stopping
        self.signals = signals
        self.watches_file = watches_file
        self._clock = clock
        self._started_at = clock() if started_at is None else started_at

    @property
    def elapsed_minutes(self) -> float:
        return (self._clock() - self._started_at) / 60.0

    def verdict(self, step: int) -> StopVerdict:
        """This rank's verdict after a step."""
        if self.watches_file and kill_switch_is_on(self.stopping.kill_switch_path):
            return StopVerdict.KILL_SWITCH
        if self.signals.received:
            return StopVerdict.SIGNAL
        limit = self.stopping.exit_duration_in_mins
        if limit is not None and self.elapsed_minutes > limit:
            return StopVerdict.DURATION
        return StopVerdict.INTERVAL if self.is_interval_over(step) else StopVerdict.CONTINUE

    def is_interval_over(self, step: int) -> bool:
        """True if --exit-interval ends the run after this step; equal on all ranks without communication."""
        return bool(self.stopping.exit_interval) and step % (self.stopping.exit_interval or 1) == 0

    def message(self, verdict: StopVerdict, step: int) -> str:
        """The log line with the reason for stopping; upstream's text if it has one."""
        if verdict is StopVerdict.KILL_SWITCH:
            return kill_switch_message(self.stopping.kill_switch_path)
        if verdict is StopVerdict.DURATION:
            return f"exiting program after {self.elapsed_minutes:.2f} minutes"
        if verdict is StopVerdict.SIGNAL:
            name = self.signals.received or "a signal to another rank"
            return f"exiting program at iteration {step} because of {name}; restart with --load to continue"
        return f"exiting program at iteration {step}"


class Stopping:
    """Decides when a run ends, at the same step on all ranks.

    Args:
        rules: this rank's stop conditions.
        mesh: all ranks.
        target: reports whether a step makes progress after a signal.

    Attributes:
        verdict: the common verdict so far.
        reason: the reason why the run stopped early; empty until then.
        steps_in_flight: maximum delay of a verdict in steps: 1 on a GPU, so that the host does not
            wait for other ranks, and 0 on a CPU.
    """

    def __init__(self, rules: StopRules, mesh: ParallelMesh, target: SignalTarget | None = None) -> None:
        self.verdict = StopVerdict.CONTINUE
        self.reason = ""
        self.steps_in_flight = 1 if mesh.device.type == "cuda" else 0
        self._rules = rules
        self._mesh = mesh
        self._target = target
        self._requested = StopVerdict.CONTINUE
        self._pending: deque[PendingMaximum] = deque()

    def after_steps(self) -> contextlib.AbstractContextManager[None]:
        """While the context is open, signals are left to the loop, which stops after a step."""
        return self._rules.signals.steps_follow(self._target)

    def request(self, verdict: StopVerdict) -> None:
        """Requests a stop on behalf of this rank."""
        self._requested = max(self._requested, verdict)

    def decide(self, step: int, *, is_last: bool = False) -> StopVerdict:
        """The common verdict of all ranks after this step.

        It takes effect at the same step on all ranks, at most `steps_in_flight` steps late; --exit-interval takes
        effect immediately.

        Args:
            is_last: it is the last step, after which the run finishes normally even if --exit-interval matches.
        """
        local = max(self._rules.verdict(step), self._requested)
        self._pending.append(PendingMaximum(int(local), self._mesh.control))
        keep = 0 if self._rules.is_interval_over(step) else self.steps_in_flight
        self.verdict = StopVerdict.CONTINUE
        while len(self._pending) > keep:
            self.verdict = max(self.verdict, StopVerdict(self._pending.popleft().wait()))
        if self.verdict is not StopVerdict.CONTINUE:
            self._rules.signals.settle()
        if is_last and self.verdict is StopVerdict.INTERVAL:
            self.verdict = StopVerdict.CONTINUE
        return self.verdict

    def explain(self, step: int) -> str:
        """Returns and stores the log line with the reason for stopping after this step."""
        self.reason = self._rules.message(self.verdict, step)
        return self.reason

    def close(self) -> None:
        """Drops pending verdicts, before the process groups are closed."""
        self._pending.clear()


def kill_switch_is_on(path: str | None) -> bool:
    """True if the kill-switch file exists; also checked before start-up."""
    return path is not None and Path(path).exists()


def kill_switch_message(path: str | None) -> str:
    """Upstream's kill-switch log line, which users search for."""
    return f"Detected kill switch at {path}. Exiting"
