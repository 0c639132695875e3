"""Compressed files as streams of bytes, read to their very end: damaged or truncated data is refused, never left out.

The standard library's readers stop silently at damage between two members of a .bz2 or .xz file, of which
parallel compressors write many; here that is an error.
"""

from __future__ import annotations

import bz2
import gzip
import lzma
from collections.abc import Callable
from io import BufferedReader
from pathlib import Path
from typing import IO, Any

from megatron.corpus.inputs.zstandard_stream import zstandard_library, zstandard_stream

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_RAW_BYTES = 1 << 17
_XZ_MEMORY_BYTES = 320 << 20  # the largest preset needs 65 MB


def is_compressed(path: str) -> bool:
    """Whether the suffix of a file says that it is compressed."""
    return _suffix(path) in _OPENERS


def decompressing(raw: BufferedReader, path: str) -> Any:
    """A reader of the text of an open compressed file; it has `read(size)` and `close()`.

    Raises:
        ConfigError: the package for it is not installed.
        EOFError: the file is empty, which no compressed file is.
    """
    if not raw.peek(1):
        raise EOFError(f"it is empty, which no {_suffix(path)} file is")
    return _OPENERS[_suffix(path)](raw, path)


def check_decompressor(path: str) -> None:
    """Checks that the package that a file's suffix needs is installed.

    Raises:
        ConfigError: it is not.
    """
    if _suffix(path) == ".zst":
        zstandard_library(path)


class _Members:
    """The text of compressed members that follow each other, as .bz2 and .xz files may hold; zeros may fill the gaps.

    Args:
        new_member: makes the decompressor of one member.
    """

    def __init__(self, raw: IO[bytes], new_member: Callable[[], Any]) -> None:
        self._raw = raw
        self._new_member = new_member
        self._member = new_member()

    def read(self, size: int) -> bytes:
        """At most `size` bytes of text; none at the end of the file.

        Raises:
            EOFError: the file ends inside a member.
            OSError, lzma.LZMAError: it is damaged.
        """
        while True:
            if self._member.eof:
                piece = (self._member.unused_data or self._raw.read(_RAW_BYTES)).lstrip(b"\x00")
                while not piece:
                    piece = self._raw.read(_RAW_BYTES)
                    if not piece:
                        return b""
                    piece = piece.lstrip(b"\x00")
                self._member = self._new_member()
            elif self._member.needs_input:
                piece = self._raw.read(_RAW_BYTES)
                if not piece:
                    raise EOFError("the file is truncated")
            else:
                piece = b""
            text: bytes = self._member.decompress(piece, size)
            if text:
                return text

    def close(self) -> None:
        """Closes the file."""
        self._raw.close()


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


_OPENERS: dict[str, Callable[[IO[bytes], str], Any]] = {
    ".gz": lambda raw, path: gzip.GzipFile(fileobj=raw),
    ".bz2": lambda raw, path: _Members(raw, bz2.BZ2Decompressor),
    ".xz": lambda raw, path: _Members(raw, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)),
    ".zst": zstandard_stream,
}
