"""How far an evaluation has come and when it will be done: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import time
from collections.abc import Callable

from tqdm import tqdm

_BAR_SECONDS = 0.1
_LINE_SECONDS = 10.0
_COLUMNS = 100


class EvaluationProgress:
    """A `Progress` of one task.

    Args:
        title: of the task.
        write_line: takes a plain line.
        write_bar: takes text for a terminal as it is; None where there is no terminal.
        clock: seconds, from any beginning.
    """

    def __init__(
        self,
        title: str,
        write_line: Callable[[str], None],
        write_bar: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title = title
        self._write_line = write_line
        self._write_bar = write_bar
        self._clock = clock
        self._start_at = clock()
        self._shown_at = self._start_at

    def __call__(self, done: int, total: int) -> None:
        """Shows the state if it is time."""
        now = self._clock()
        if now - self._shown_at < (_LINE_SECONDS if self._write_bar is None else _BAR_SECONDS):
            return
        self._shown_at = now
        text = tqdm.format_meter(
            done, total, now - self._start_at, ncols=_COLUMNS, prefix=self._title, unit=" queries", ascii=True
        )
        if self._write_bar is None:
            self._write_line(text)
        else:
            self._write_bar(f"\r{text}\x1b[K")

    def clear(self) -> None:
        """Removes the bar."""
        if self._write_bar is not None:
            self._write_bar("\r\x1b[K")
