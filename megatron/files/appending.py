"""Appending lines to a file that a crash may have left with an incomplete last line."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from megatron.files.exact import write_all
from megatron.files.replacing import sync_file

_FLAGS = os.O_CREAT | os.O_APPEND | os.O_CLOEXEC


def append_line(path: Path, line: str, *, durable: bool = False) -> None:
    """Appends a line to a regular file, which is created if missing; links are not followed.

    Args:
        line: without line terminator.
        durable: sync the file.

    Raises:
        OSError: the file system refused.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | _FLAGS, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = "\n" * is_torn + line + "\n"
        write_all(lambda rest, _: os.write(descriptor, rest), content.encode(errors="replace"))
        if durable:
            sync_file(descriptor)
    finally:
        os.close(descriptor)


class LogCopy:
    """A file that receives every message; failures are counted, not raised."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.fspath(path)
        self.lost = 0
        self.reason = ""
        self._is_torn = False
        self._descriptor = os.open(path, os.O_WRONLY | _FLAGS, 0o666)

    def append(self, text: str) -> bool:
        """Appends a message, after ending a partially written one; returns True if it was written."""
        data = ("\n" * self._is_torn + text).encode(errors="backslashreplace")
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError as failure:
            self._is_torn |= written > 0
            self.lost += 1
            self.reason = failure.strerror or str(failure)
            return False
        self._is_torn = False
        return True

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.close(self._descriptor)
