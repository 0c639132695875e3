"""Compressed files as streams of bytes, read to their very end: what is damaged or cut is refused, never left out.

The libraries' own readers stop without a word at damage between two members of a .bz2 or .xz file (parallel compressors
write many members) and at the end of a .zst file that was cut; here both are errors.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

from megatron.errors import ConfigError

_RAW_BYTES = 1 << 17
_XZ_MEMORY_BYTES = 320 << 20  # the largest preset needs 65 MB
_ZSTANDARD_MAGIC = 0xFD2FB528
_SKIPPABLE_MAGIC = 0x184D2A50  # and the 15 numbers after it
_LONGEST_FRAME_HEADER_BYTES = 18


def is_compressed(path: str) -> bool:
    """Whether the suffix of a file says that it is compressed."""
    return _suffix(path) in _OPENERS


def decompressing(raw: IO[bytes], path: str) -> Any:
    """A reader of the text of an open compressed file; it has `read(size)` and `close()`.

    Raises:
        ConfigError: the package for it is not installed.
        EOFError: the file is empty, which no compressed file is.
    """
    if not raw.read(1):
        raise EOFError(f"it is empty, which no {_suffix(path)} file is")
    raw = _Again(raw)
    return _OPENERS[_suffix(path)](raw, path)


def check_decompressor(path: str) -> None:
    """Checks that the package is there which a file's suffix needs.

    Raises:
        ConfigError: it is not.
    """
    if _suffix(path) == ".zst":
        _zstandard(path)
