"""How far a long job has come: a bar that is redrawn on a terminal, a plain line now and then elsewhere."""

from __future__ import annotations

from collections.abc import Callable

_BAR_SECONDS = 0.1


class ProgressDisplay:
    """Shows the state of a job, not more often than a reader wants it.

    Args:
        write_line: takes a plain line.
        draw_bar: shows a text in place of the last one, none if it is empty, see `log.status_line`; None where there is
            no terminal.
        line_seconds: the time between two plain lines, at least.
        clock: seconds, from any beginning.
    """

    def __init__(
        self,
        write_line: Callable[[str], None],
        draw_bar: Callable[[str], object] | None,
        line_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        self.write_line, self.draw_bar = write_line, draw_bar
        self._interval_seconds = line_seconds if draw_bar is None else _BAR_SECONDS
        self._clock = clock
        self._start_at = self._shown_at = clock()

    @property
    def seconds(self) -> float:
        return self._clock() - self._start_at

    def is_due(self) -> bool:
        """Whether the time has come to show the state again."""
        return self._clock() - self._shown_at >= self._interval_seconds

    def show(self, text: str) -> None:
        """Draws the bar, or writes the plain line."""
        self._shown_at = self._clock()
        (self.write_line if self.draw_bar is None else self.draw_bar)(text)

    def clear(self) -> None:
        if self.draw_bar is not None:
            self.draw_bar("")
