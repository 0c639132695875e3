"""Input files to blocks of whole lines, in order, with memory that does not grow with the file.

A plain file is cut by looking only at the neighbourhood of the cuts: who encodes a block reads it. A compressed file or
standard input is read once, here, and its blocks carry their bytes.
"""

from __future__ import annotations

import bz2
import gzip
import importlib
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from megatron.errors import ConfigError, DataError

STANDARD_INPUT = "-"
_CUT_SEARCH_BYTES = 1 << 16
_READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Block:
    """Whole lines of one input; the last line of an input may lack its newline.

    Args:
        source: the input as it was given.
        start: byte offset in the (uncompressed) input.
        size: bytes of the block.
        data: its bytes, or None when they are to be read from the file `source`.
        input_bytes: bytes of the input as it lies on disk that were consumed for this block.
    """

    source: str
    start: int
    size: int
    data: bytes | None
    input_bytes: int

    def read(self) -> bytes:
        """The bytes of the block.

        Raises:
            DataError: the file has become shorter or unreadable since it was cut.
        """
        if self.data is not None:
            return self.data
        try:
            with open(self.source, "rb", buffering=0) as file:
                file.seek(self.start)
                data = _read_exactly(file, self.size)
        except OSError as failure:
            raise _unreadable(self.source, self.start, failure) from failure
        if len(data) != self.size:
            raise DataError(
                f"{self.source}: ended at byte offset {self.start + len(data)} instead of "
                f"{self.start + self.size}: it was cut while "
                "it was read. Start again when nothing writes to it."
            )
        return data


def check_inputs(paths: Sequence[str]) -> None:
    """Checks that every input exists and can be opened, before any work is done.

    Raises:
        ConfigError: with all inputs that cannot be read.
    """
    problems = []
    if paths.count(STANDARD_INPUT) > 1:
        problems.append(
            f"--input names standard input ({STANDARD_INPUT}) {paths.count(STANDARD_INPUT)} times; it can be read once."
        )
    for path in paths:
        if path == STANDARD_INPUT:
            continue
        if os.path.isdir(path):
            problems.append(f"--input {path} is a folder; name the files in it.")
            continue
        try:
            with open(path, "rb"):
                pass
            if _suffix(path) == ".zst":
                _zstandard(path)
        except OSError as failure:
            problems.append(
                f"--input {path} cannot be read: {failure.strerror or failure}. Give the path of a jsonl "
                "file, or - for standard input."
            )
        except ConfigError as failure:
            problems.extend(failure.problems)
    if problems:
        raise ConfigError(problems)


def total_bytes(paths: Sequence[str]) -> int | None:
    """Size of all inputs as they lie on disk, in bytes; None if one of them is a pipe."""
    sizes = [_regular_size(path) for path in paths]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def blocks(paths: Sequence[str], block_bytes: int) -> Iterator[Block]:
    """Cuts the inputs, one after the other, into blocks of whole lines.

    Args:
        block_bytes: least size of a block; a longer line makes a longer block.

    Raises:
        DataError: an input cannot be read or decompressed; the text says where.
    """
    for path in paths:
        plain = path != STANDARD_INPUT and _suffix(path) not in _OPENERS and _regular_size(path) is not None
        yield from _cut(path, block_bytes) if plain else _stream(path, block_bytes)


def _cut(path: str, block_bytes: int) -> Iterator[Block]:
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            start = 0
            while start < size:
                stop = _line_end(file, min(start + block_bytes, size), size)
                yield Block(path, start, stop - start, None, stop - start)
                start = stop
    except OSError as failure:
        raise _unreadable(path, 0, failure) from failure


def _line_end(file: IO[bytes], position: int, size: int) -> int:
    """First offset at or after `position` that follows a newline."""
    position -= 1
    while position < size:
        file.seek(position)
        near = file.read(_CUT_SEARCH_BYTES)
        if not near:
            break
        found = near.find(b"\n")
        if found >= 0:
            return position + found + 1
        position += len(near)
    return size


def _stream(path: str, block_bytes: int) -> Iterator[Block]:
    start = consumed = 0
    parts: list[bytes] = []
    held = 0
    stream = None
    try:
        stream, position = _open(path)
        while chunk := stream.read(_READ_BYTES):
            end = chunk.rfind(b"\n") + 1
            if held + len(chunk) < block_bytes or not end:
                parts.append(chunk)
                held += len(chunk)
                continue
            parts.append(chunk[:end])
            data = b"".join(parts)
            parts = [chunk[end:]] if end < len(chunk) else []
            held = len(chunk) - end
            reached = position()
            yield Block(_shown(path), start, len(data), data, reached - consumed)
            start, consumed = start + len(data), reached
        if parts:
            data = b"".join(parts)
            yield Block(_shown(path), start, len(data), data, position() - consumed)
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as failure:
        raise _unreadable(path, start + held, failure) from failure
    except Exception as failure:
        if type(failure).__name__ == "ZstdError":
            raise _unreadable(path, start + held, failure) from failure
        raise
    finally:
        if stream is not None and path != STANDARD_INPUT:
            stream.close()


def _open(path: str) -> tuple[Any, Callable[[], int]]:
    """Opens an input for reading; the second value says how many of its bytes on disk were consumed so far."""
    if path == STANDARD_INPUT:
        return sys.stdin.buffer, lambda: 0
    raw = open(path, "rb")
    opener = _OPENERS.get(_suffix(path))
    return (opener(raw, path) if opener else raw), (raw.tell if raw.seekable() else lambda: 0)


def _zstandard(path: str) -> Any:
    try:
        return importlib.import_module("zstandard")
    except ImportError as failure:
        raise ConfigError(
            f"--input {path} needs the zstandard package (pip install zstandard), or decompress it first."
        ) from failure


_OPENERS: dict[str, Callable[[IO[bytes], str], Any]] = {
    ".gz": lambda raw, path: gzip.GzipFile(fileobj=raw),
    ".bz2": lambda raw, path: bz2.BZ2File(raw),
    ".xz": lambda raw, path: _xz(raw),
    ".zst": lambda raw, path: _zstandard(path).ZstdDecompressor().stream_reader(raw, read_across_frames=True),
}


def _xz(raw: IO[bytes]) -> Any:
    return lzma.LZMAFile(raw)


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


def _regular_size(path: str) -> int | None:
    if path == STANDARD_INPUT or not os.path.isfile(path):
        return None
    return os.path.getsize(path)


def _read_exactly(file: Any, size: int) -> bytes:
    data = file.read(size)
    if len(data) == size or not data:
        return bytes(data)
    parts = [data]
    missing = size - len(data)
    while missing and (part := file.read(missing)):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def _shown(path: str) -> str:
    return "<stdin>" if path == STANDARD_INPUT else path


def _unreadable(path: str, offset: int, failure: BaseException) -> DataError:
    return DataError(
        f"{_shown(path)}: cannot be read past byte offset {offset} of its text: {failure}. The file is "
        "damaged or not what its suffix says; "
        "fetch it again or leave it out."
    )
