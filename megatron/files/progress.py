"""How far a long job has come: a bar that is redrawn on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable

_BAR_SECONDS = 0.1


class ProgressDisplay:
    """Shows the state of a job, not more often than a reader wants it.

    Args:
        write_line: takes a plain line.
        write_bar: takes text for a terminal as it is; None where there is no terminal.
        line_seconds: the time between two plain lines, at least.
        clock: seconds, from any beginning.
    """

    def __init__(
        self,
        write_line: Callable[[str], None],
        write_bar: Callable[[str], object] | None,
        line_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.write_line = write_line
        self._write_bar = write_bar
        self._interval_seconds = line_seconds if write_bar is None else _BAR_SECONDS
        self._clock = clock
        self._start_at = self._shown_at = clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._start_at

    @property
    def is_bar(self) -> bool:
        return self._write_bar is not None

    def is_due(self) -> bool:
        """Whether the time has come to show the state again."""
        return self._clock() - self._shown_at >= self._interval_seconds

    def show(self, text: str) -> None:
        """Draws the bar, or writes the plain line."""
        self._shown_at = self._clock()
        if self._write_bar is None:
            self.write_line(text)
        else:
            self._write_bar(f"\r{text}\x1b[K")

    def clear(self) -> None:
        """Removes the bar, so that what follows stands alone."""
        if self._write_bar is not None:
            self._write_bar("\r\x1b[K")
