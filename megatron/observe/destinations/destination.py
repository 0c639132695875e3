"""The protocol of metrics destinations, and `Safeguard`, which keeps their failures from ending the run.

On a full disk, training continues. Writing to an unbuffered file is retried with every record; a buffered destination
is disabled after its first failure, until the run is restarted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from megatron import log
from megatron.checkpoint.record import Progress
from megatron.objective.metric import StepMetrics
from megatron.observe.metrics import TaskOutcome

_UNFLUSHED = ("step", "skipped_batch")


class Destination(Protocol):
    """A destination of metrics besides the console.

    Attributes:
        name: its file, or service and project, for warnings.
        is_buffered: steps are certainly written only once `interval`, `evaluation` or `task` has returned; such a
            destination is not used again after a failure.
    """

    name: str
    is_buffered: bool

    def start(self, progress: Progress, arguments: Mapping[str, Any]) -> None:
        """Called when training starts or resumes."""

    def step(self, metrics: StepMetrics) -> None:
        """Called after every step."""

    def interval(self, metrics: StepMetrics) -> None:
        """Called after every log interval."""

    def evaluation(self, progress: Progress, group: str, loss: float | None) -> None:
        """Called after a data group was evaluated."""

    def task(self, progress: Progress, task: TaskOutcome) -> None:
        """Called after a task of --eval-tasks was run."""

    def skipped_batch(self, progress: Progress, batch: Mapping[str, int], number: int) -> None:
        """Called after a batch was skipped."""

    def failed_save(self, progress: Progress, step: int, reason: str, number: int) -> None:
        """Called when a save has failed."""

    def close(self) -> None:
        """Called at the end of the run."""


class Safeguard:
    """A destination whose failures are warnings: when an outage starts, when it ends, and at the end of the run."""

    def __init__(self, destination: Destination) -> None:
        self.destination = destination
        self._is_off = False
        self._failing: str | None = None  # the failing call
        self._step = 0
        self._unsure: int | None = None  # first step that may not be written yet
        self._lost: tuple[int, int] | None = None
        self._reason = ""

    def record(self, call: str, step: int, write: Callable[[Destination], None]) -> None:
        """Writes a record.

        Args:
            call: the name of the method that `write` calls.
            step: the step of the record.
        """
        self._step = step
        if self._is_off:
            self._lose(step)
            return
        self._unsure = step if self._unsure is None else self._unsure
        if not self._attempt(call, write):
            return
        if call not in _UNFLUSHED or not self.destination.is_buffered:
            self._unsure = None
        if self._failing == call and self._lost is not None:
            self._failing = None
            first, last = self._lost
            log.warning(f"{self.destination.name} works again; records of steps {first} to {last} are missing.")

    def close(self) -> None:
        """Closes the destination, and warns of missing records."""
        if not self._is_off:
            self._attempt("close", lambda destination: destination.close())
        if self._lost is not None:
            first, last = self._lost
            log.warning(f"{self.destination.name}: records of steps {first} to {last} are missing ({self._reason}).")

    def _attempt(self, call: str, write: Callable[[Destination], None]) -> bool:
        try:
            write(self.destination)
        except (Exception, SystemExit) as failure:  # client libraries may raise anything
            self._reason = _reason(failure)
            self._is_off = self.destination.is_buffered
            if self._failing is None:
                outlook = "until it is restarted" if self._is_off else "and retries with every record"
                log.warning(
                    f"{self.destination.name} cannot be written: {self._reason}. The run continues without it "
                    f"{outlook}."
                )
                self._failing = call
            if self._unsure is not None:
                self._lose(self._unsure)
            self._unsure = None
            return False
        return True

    def _lose(self, first: int) -> None:
        self._lost = (first if self._lost is None else min(first, self._lost[0]), self._step)


def _reason(failure: BaseException) -> str:
    cause = failure.__cause__ or failure
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    return " ".join(str(failure).split()).rstrip(".") or type(failure).__name__
