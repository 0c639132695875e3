"""The files that a cleaning run writes: jsonl, compressed by the suffix of the name, published when complete."""

from __future__ import annotations

import contextlib
import gzip
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from megatron.corpus.inputs.zstandard_stream import zstandard_library
from megatron.errors import ConfigError
from megatron.files.replacing import write_atomically

_GZIP_LEVEL = 6
_ZSTANDARD_ADVICE = "name it .jsonl.gz"
_ZSTANDARD_LEVEL = 3


def check_output(flag: str, path: str) -> None:
    """Checks that a file of this name can be written as its suffix says.

    Raises:
        ConfigError: the suffix is of a compression that is not written, or its library is missing.
    """
    suffix = Path(path).suffix.lower()
    if suffix in (".bz2", ".xz", ".parquet"):
        raise ConfigError(f"{flag} {path}: {suffix} is not written. Name it .jsonl, .jsonl.gz or .jsonl.zst.")
    if suffix == ".zst":
        zstandard_library(path, flag, _ZSTANDARD_ADVICE)


def write_lines(path: str, write: Callable[[Any], None]) -> None:
    """Writes a file through `write`, compressed if the suffix is .gz or .zst; it appears when it is complete.

    The bytes depend on the lines only: no name and no time is put into a .gz file.

    Raises:
        StorageError: the file system refused; nothing is left behind.
    """

    def packed(stream: BinaryIO) -> None:
        with _compressed(path, stream) as lines:
            write(lines)

    write_atomically(Path(path), packed)


@contextlib.contextmanager
def _compressed(path: str, stream: BinaryIO) -> Iterator[Any]:
    suffix = Path(path).suffix.lower()
    if suffix == ".gz":
        with gzip.GzipFile("", "wb", _GZIP_LEVEL, stream, mtime=0) as lines:
            yield lines
    elif suffix == ".zst":
        compressor = zstandard_library(path, "--output", _ZSTANDARD_ADVICE).ZstdCompressor(level=_ZSTANDARD_LEVEL)
        with compressor.stream_writer(stream, closefd=False) as lines:
            yield lines
    else:
        yield stream
