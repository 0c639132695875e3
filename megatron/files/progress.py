"""Progress of a long job: a bar on a terminal, elsewhere an occasional line."""

from __future__ import annotations

from collections.abc import Callable

_BAR_SECONDS = 0.1


class ProgressDisplay:
    """Shows the progress of a job at limited intervals.

    Args:
        write_line: prints a line.
        draw_bar: replaces the last text, see `log.status_line`; None without a terminal.
        line_seconds: minimum interval between lines.
        clock: seconds from any origin.
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
        return self._clock() - self._shown_at >= self._interval_seconds

    def show(self, text: str) -> None:
        """Draws the bar, or writes the plain line."""
        self._shown_at = self._clock()
        (self.write_line if self.draw_bar is None else self.draw_bar)(text)

    def clear(self) -> None:
        if self.draw_bar is not None:
            self.draw_bar("")
