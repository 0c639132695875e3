"""Follows a file of lines that another process appends to."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import orjson

from megatron.files.plain import open_plain
from trident.dashboard.records import is_shallow

_Result = TypeVar("_Result")


@dataclass(frozen=True)
class NewLines:
    """The lines of one read.

    Attributes:
        lines: complete lines without line ends.
        is_new: the file was replaced or truncated: earlier lines are invalid.
        has_more: another part can be read immediately.
    """

    lines: tuple[bytes, ...] = ()
    is_new: bool = False
    has_more: bool = False


class LineTail:
    """Follows one file, which may be missing, truncated, replaced or deleted, and may end in an incomplete line.

    Symbolic links are not followed, so that a folder of runs cannot show files from elsewhere.

    Args:
        part_bytes: size of one read; longer lines are skipped.
    """

    def __init__(self, path: Path, part_bytes: int = 1 << 20) -> None:
        self.path = path
        self.size_bytes = 0
        self.changed_at = 0.0
        self._part_bytes = part_bytes
        self._file: tuple[int, int] | None = None
        self._seen: tuple[int, int] = (0, 0)
        self._offset = 0
        self._is_inside_long_line = False

    def read(self) -> NewLines:
        """Returns the lines completed since the last call."""
        status = _stat(self.path)
        if status is None:
            is_gone = self._file is not None
            self._forget(None)
            return NewLines(is_new=is_gone)
        identity = (status.st_dev, status.st_ino)
        is_new = self._file is not None and (identity != self._file or status.st_size < self._offset)
        if is_new or self._file is None:
            self._forget(identity)
        self.size_bytes, self.changed_at = status.st_size, status.st_mtime
        if (status.st_size, status.st_mtime_ns) == self._seen:
            return NewLines(is_new=is_new)
        offset, most_bytes = self._offset, self._part_bytes
        content = _using(self.path, lambda descriptor: os.pread(descriptor, most_bytes, offset), b"")
        end = content.rfind(b"\n") + 1
        has_more = len(content) == self._part_bytes
        if not has_more:
            self._seen = (status.st_size, status.st_mtime_ns)
        if end == 0:
            if has_more:
                self._offset, self._is_inside_long_line = self._offset + len(content), True
            return NewLines(is_new=is_new, has_more=has_more)
        self._offset += end
        lines = content[: end - 1].split(b"\n")
        if self._is_inside_long_line:
            self._is_inside_long_line, lines = False, lines[1:]
        return NewLines(tuple(lines), is_new, has_more)

    @property
    def progress(self) -> float:
        """Fraction of the file read so far, from 0 to 1."""
        return min(1.0, self._offset / self.size_bytes) if self.size_bytes else 1.0

    def sampled(self, count: int, window_bytes: int = 4096) -> list[bytes]:
        """Complete lines at evenly spaced offsets, in order: a preview of a long file."""

        def take(descriptor: int) -> list[bytes]:
            size, previous, lines = os.fstat(descriptor).st_size, -1, []
            for number in range(count):
                offset = size * number // count
                head, mark, rest = os.pread(descriptor, window_bytes, offset).partition(b"\n")
                line, end, _ = rest.partition(b"\n")
                start = offset + len(head) + 1
                if mark and end and start > previous:
                    lines.append(line)
                    previous = start
            last = os.pread(descriptor, window_bytes, max(0, size - window_bytes)).rpartition(b"\n")[0]
            return [*lines, last.rpartition(b"\n")[2]] if b"\n" in last else lines

        return _using(self.path, take, [])

    def _forget(self, identity: tuple[int, int] | None) -> None:
        self._file, self._offset, self._seen, self._is_inside_long_line = identity, 0, (0, 0), False
        self.size_bytes = 0


def parse_records(lines: Sequence[bytes]) -> list[dict[str, Any]]:
    """The JSON objects among some lines; other lines are skipped."""
    if not lines:
        return []
    try:
        values = orjson.loads(b"[" + b",".join(lines) + b"]")
    except orjson.JSONDecodeError:
        values = []
    if len(values) != len(lines):
        values = [value for line in lines for value in _parsed(line)]
    return [value for value in values if isinstance(value, dict)]


def read_tail(path: Path, most_bytes: int) -> tuple[str, int]:
    """The last lines of a text file, and its size in bytes; empty if it cannot be read."""

    def take(descriptor: int) -> tuple[str, int]:
        size = os.fstat(descriptor).st_size
        content = os.pread(descriptor, most_bytes, max(0, size - most_bytes))
        if size > most_bytes:
            content = content.partition(b"\n")[2]
        return content.decode(errors="replace"), size

    return _using(path, take, ("", 0))


def read_object(path: Path, most_bytes: int = 4 << 20) -> dict[str, Any] | None:
    """The JSON object in a file; None if it is missing, too large or too deeply nested."""

    def take(descriptor: int) -> bytes:
        return b"" if os.fstat(descriptor).st_size > most_bytes else os.pread(descriptor, most_bytes, 0)

    values = _parsed(_using(path, take, b""))
    return next((value for value in values if isinstance(value, dict) and is_shallow(value)), None)


def _parsed(line: bytes) -> Iterator[Any]:
    try:
        yield orjson.loads(line)
    except orjson.JSONDecodeError:
        return


def _stat(path: Path) -> os.stat_result | None:
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None


def _using(path: Path, act: Callable[[int], _Result], otherwise: _Result) -> _Result:
    """Calls `act` with the descriptor of a regular file; returns `otherwise` if it cannot be opened or read."""
    try:
        with open_plain(path, 0, follows_links=False) as stream:
            return act(stream.fileno())
    except OSError:
        return otherwise
