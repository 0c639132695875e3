"""Readers for compressed files that detect all damage and truncation.

The standard library's readers stop silently at damage between two members of a .bz2 or .xz file (parallel compressors
write many), and the zstandard package's ignores truncation; here both are errors.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from megatron.errors import ConfigError

COMPRESSIONS = (".gz", ".bz2", ".xz", ".zst")
_XZ_MEMORY_BYTES = 320 << 20  # the largest preset needs 65 MB
# Bytes per step: 128 KiB of zeros take four bytes in a zstd frame, so one step can yield 32 MiB.
_FEED_BYTES = 1 << 10


def is_compressed(path: str) -> bool:
    """Returns True if a file has the suffix of a compressed file."""
    return _suffix(path) in _OPENERS


def decompressing(raw: io.BufferedReader, path: str) -> Any:
    """Returns a reader, with `read(size)` and `close()`, for the text of an open compressed file.

    Raises:
        ConfigError: the package for it is not installed.
        EOFError: the file is empty, which is invalid for a compressed file.
    """
    if not raw.peek(1):
        raise EOFError(f"it is empty, which no {_suffix(path)} file is")
    return _OPENERS[_suffix(path)](raw, path)


def check_decompressor(path: str) -> None:
    """Checks that the package required by a file's suffix is installed.

    Raises:
        ConfigError: it is not.
    """
    if _suffix(path) == ".zst":
        zstandard_library(path)


class _Members(io.RawIOBase):
    """The text of consecutive compressed members, or frames, up to the end of a file.

    Args:
        new_member: creates the decompressor of one member.
        padding: bytes that may fill the gaps between members.
        truncated: message for a file that ends inside a member.

    Raises:
        EOFError: on reading, the file ends inside a member.
        OSError, lzma.LZMAError, zstandard.ZstdError: on reading, the file is damaged.
    """

    def __init__(self, raw: IO[bytes], new_member: Callable[[], Any], padding: bytes, truncated: str) -> None:
        self._raw = io.BufferedReader(raw, 1 << 20) if isinstance(raw, io.RawIOBase) else raw
        self._new_member = new_member
        self._padding = padding
        self._truncated = truncated
        self._member: Any = None
        self._fed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def close(self) -> None:
        self._raw.close()
        super().close()

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._advance():
                return 0
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _advance(self) -> bool:
        """Decompresses a chunk; returns False at the end of the file."""
        self._fed = self._fed or self._raw.read(_FEED_BYTES)
        if not self._fed:
            if self._member is not None:
                raise EOFError(self._truncated)
            return False
        if self._member is None:
            self._fed = self._fed.lstrip(self._padding) if self._padding else self._fed
            if not self._fed:
                return True
            self._member = self._new_member()
        self._ready = memoryview(self._member.decompress(self._fed))
        self._fed = b""
        if self._member.eof:
            self._fed, self._member = self._member.unused_data, None
        return True


def zstandard_stream(raw: IO[bytes], path: str) -> IO[bytes]:
    """Returns a reader for the decompressed bytes of all frames of a file.

    Raises:
        ConfigError: the package is not installed.
        EOFError: on reading, the file ends inside a frame.
    """
    library = zstandard_library(path)
    truncated = "the file ends inside a compressed frame"
    return _members(raw, lambda: library.ZstdDecompressor().decompressobj(), b"", truncated)


def zstandard_library(path: str, flag: str = "--input", advice: str = "decompress it first") -> Any:
    """Imports the package, required for a file given by a flag.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import zstandard
    except ImportError as failure:
        raise ConfigError(
            f"{flag} {path} requires the zstandard package (pip install zstandard), or {advice}."
        ) from failure
    return zstandard


def _members(
    raw: IO[bytes], new_member: Callable[[], Any], padding: bytes = b"\x00", truncated: str = "the file is truncated"
) -> IO[bytes]:
    return io.BufferedReader(_Members(raw, new_member, padding, truncated), 1 << 20)


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


_OPENERS: dict[str, Callable[[IO[bytes], str], Any]] = {
    ".gz": lambda raw, path: gzip.GzipFile(fileobj=raw),
    ".bz2": lambda raw, path: _members(raw, bz2.BZ2Decompressor),
    ".xz": lambda raw, path: _members(raw, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)),
    ".zst": zstandard_stream,
}
