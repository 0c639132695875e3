"""Compressed files as streams of bytes, read to their very end: damaged or truncated data is refused, never left out.

The standard library's readers stop silently at damage between two members of a .bz2 or .xz file, of which
parallel compressors write many, and the zstandard package's does not notice that a file was truncated; here both are
errors.
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
_RAW_BYTES = 1 << 17
_XZ_MEMORY_BYTES = 320 << 20  # the largest preset needs 65 MB
# One block of a zstd frame may say "128 KiB of zeros" in four bytes; this bounds what one step can give to 32 MiB.
_FEED_BYTES = 1 << 10


def is_compressed(path: str) -> bool:
    """Whether the suffix of a file says that it is compressed."""
    return _suffix(path) in _OPENERS


def decompressing(raw: io.BufferedReader, path: str) -> Any:
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


def zstandard_stream(raw: IO[bytes], path: str) -> IO[bytes]:
    """The decompressed bytes of all frames of a file.

    Raises:
        ConfigError: the package is not installed.
        EOFError: on reading, the file ends inside a frame.
    """
    return io.BufferedReader(_Frames(raw, zstandard_library(path)), 1 << 20)


def zstandard_library(path: str, flag: str = "--input", advice: str = "decompress it first") -> Any:
    """The package, asked for on behalf of a file that a flag names.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import zstandard
    except ImportError as failure:
        raise ConfigError(
            f"{flag} {path} needs the zstandard package (pip install zstandard), or {advice}."
        ) from failure
    return zstandard


class _Frames(io.RawIOBase):
    def __init__(self, raw: IO[bytes], library: Any) -> None:
        self._raw = io.BufferedReader(raw, 1 << 20) if isinstance(raw, io.RawIOBase) else raw
        self._library = library
        self._frame: Any = None
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
        """Decompresses a little more; False at the end of the file."""
        self._fed = self._fed or self._raw.read(_FEED_BYTES)
        if not self._fed:
            if self._frame is not None:
                raise EOFError("the file ends inside a compressed frame")
            return False
        if self._frame is None:
            self._frame = self._library.ZstdDecompressor().decompressobj()
        self._ready = memoryview(self._frame.decompress(self._fed))
        self._fed = b""
        if self._frame.eof:
            self._fed, self._frame = self._frame.unused_data, None
        return True


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


_OPENERS: dict[str, Callable[[IO[bytes], str], Any]] = {
    ".gz": lambda raw, path: gzip.GzipFile(fileobj=raw),
    ".bz2": lambda raw, path: _Members(raw, bz2.BZ2Decompressor),
    ".xz": lambda raw, path: _Members(raw, lambda: lzma.LZMADecompressor(memlimit=_XZ_MEMORY_BYTES)),
    ".zst": zstandard_stream,
}
