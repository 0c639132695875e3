"""The progress of a long job over documents, with rates and the remaining time."""

from __future__ import annotations

import time
from collections.abc import Callable

from megatron.files.progress import ProgressDisplay

_BAR_WIDTH = 24
_LINE_SECONDS = 1.0


class ProgressLine(ProgressDisplay):
    """Counts documents and bytes and displays them periodically.

    Args:
        total_bytes: size of the inputs on disk, None if unknown.
        every_documents: documents between two plain lines, which come at most once a second.
        write_line, draw_bar: see `ProgressDisplay`.
    """

    def __init__(
        self,
        total_bytes: int | None,
        every_documents: int,
        write_line: Callable[[str], None],
        draw_bar: Callable[[str], object] | None = None,
    ) -> None:
        super().__init__(write_line, draw_bar, _LINE_SECONDS, time.monotonic)
        self.documents = 0
        self.text_bytes = 0
        self._input_bytes = 0
        self._total_bytes = total_bytes
        self._every_documents = every_documents
        self._shown_documents = 0

    def advance(self, documents: int, text_bytes: int, input_bytes: int) -> None:
        """Adds to the counts, and displays them if due."""
        self.documents += documents
        self.text_bytes += text_bytes
        self._input_bytes += input_bytes
        is_bar = self.draw_bar is not None
        if self.is_due() and (is_bar or self.documents - self._shown_documents >= self._every_documents):
            self._shown_documents = self.documents
            self.show(self._bar() if is_bar else self.line())

    def skip(self, input_bytes: int) -> None:
        """Removes skipped work from the total."""
        if self._total_bytes is not None:
            self._total_bytes -= input_bytes

    def finish(self) -> None:
        """Removes the bar and leaves the last counts as a line."""
        self.clear()
        self.write_line(self.line())

    def line(self) -> str:
        seconds = max(self.seconds, 1e-9)
        return (
            f"Processed {self.documents} documents ({self.documents / seconds:.1f} docs/s, "
            f"{self.text_bytes / seconds / 1e6:.2f} MB/s)."
        )

    def _bar(self) -> str:
        seconds = max(self.seconds, 1e-9)
        rates = (
            f"{self.documents:,} docs, {self.documents / seconds:,.0f} docs/s, "
            f"{self.text_bytes / seconds / 1e6:.1f} MB/s"
        )
        if not self._total_bytes:
            return f"{rates}, {self.text_bytes / 1e6:,.0f} MB"
        share = min(self._input_bytes / self._total_bytes, 1.0)
        filled = int(share * _BAR_WIDTH)
        left = f", ETA {_clock(seconds * (1 - share) / share)}" if share > 0 else ""
        return f"[{'=' * filled}{' ' * (_BAR_WIDTH - filled)}] {share:4.0%} {rates}{left}"


def _clock(seconds: float) -> str:
    minutes, second = divmod(int(seconds + 0.5), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02d}:{second:02d}" if hours else f"{minute}:{second:02d}"
