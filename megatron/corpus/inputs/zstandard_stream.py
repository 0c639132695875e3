"""Reading `.zst` files; the library's own reader does not notice that a file was truncated."""

from __future__ import annotations

import io
from typing import IO, Any

from megatron.errors import ConfigError

# One block of a zstd frame may say "128 KiB of zeros" in four bytes; this bounds what one step can give to 32 MiB.
_FEED_BYTES = 1 << 10


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
