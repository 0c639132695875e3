"""The watchdog: no rank of a run hangs or ends in silence."""

from __future__ import annotations

import time
from types import TracebackType
from typing import final

from megatron.parallel.watch.position import END, START, Position, first_position


@final
class Watch:
    """Says where this rank is, and shares with the other ranks how it fails; a context manager.

    All but `enter` may be called from any thread.
    """

    def __init__(self) -> None:
        self._position = first_position()
        self._longest_seconds = 0.0

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.enter(END)

    def enter(self, phase: str, step: int | None = None) -> None:
        """Says that the main thread enters a phase, one of `position.PHASES`; that is progress.

        Args:
            step: the step it belongs to; that of the previous phase if left out.
        """
        before, now = self._position, time.monotonic()
        if now - before.at_seconds > self._longest_seconds and before.phase != START:
            self._longest_seconds = now - before.at_seconds
        self._position = Position(phase, before.step if step is None else step, before.events + 1, now)

    def beat(self) -> None:
        """Says that long work in the present phase makes progress."""
        self.enter(self._position.phase)

    def fail(self, code: int, text: str) -> bool:
        """Tells the other ranks that this one ends with an error.

        Where there are others, this does not return: one of them shows the error that came first, and every rank,
        this one included, ends with its code. A process that is alone returns at once and must show its error itself.

        Args:
            code: the exit code; `ExitCode.REQUEUE` gives way to an error of another rank, which may be its cause.
            text: what the user is to see, without a prefix.

        Returns:
            False: nobody else shows the error.
        """
        return False

    def peers_answer(self) -> bool:
        """Asks all other ranks for a sign of life, and waits for it for at most two seconds."""
        return True

    def seconds_without_progress(self) -> float:
        """Seconds since the main thread of this rank entered a phase or made progress in one."""
        return time.monotonic() - self._position.at_seconds

    def longest_seconds(self) -> float:
        """The longest that this rank went without progress after start-up before it made some again, in seconds."""
        return self._longest_seconds
