"""Cuts input files into blocks of whole lines, in order, with memory independent of the file size.

A plain file is cut by reading only around the cuts: the worker that encodes a block reads it. A compressed file or
standard input is read once, here, and its blocks carry their bytes.
"""

from __future__ import annotations

import json
import lzma
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from io import BufferedReader
from pathlib import Path
from typing import IO, Any, cast

from megatron.errors import ConfigError, DataError
from megatron.files.exact import read_exactly
from megatron.files.plain import open_plain, open_stream
from trident.corpus.inputs.block import LINE_END, InputBlock, as_block_data, separator_pattern, shown_path, unreadable
from trident.corpus.inputs.compressed import check_decompressor, decompressing, is_compressed
from trident.corpus.inputs.input_paths import STANDARD_INPUT, InputPart, layout_of
from trident.corpus.inputs.lines import BYTE_ORDER_MARK
from trident.corpus.inputs.parquet import check_parquet, parquet_rows
from trident.corpus.inputs.tables import is_table, open_table

_CUT_SEARCH_BYTES = 1 << 16
_LONG_REST_BYTES = 16 << 20
_READ_BYTES = 1 << 20
_LONGEST_FREE_BYTES = 64 << 20  # compressed documents up to this size may have any ratio
_LONGEST_DOCUMENT_BYTES = 4 << 30
_LARGEST_RATIO = 100  # text is compressed by 3 to 10


def check_inputs(paths: Sequence[str], keys: Sequence[str] = ()) -> None:
    """Checks that every input exists and can be opened, before any work is done.

    Args:
        keys: a Parquet input must have a column for each.

    Raises:
        ConfigError: listing all inputs that cannot be read.
    """
    problems = []
    if paths.count(STANDARD_INPUT) > 1:
        problems.append(
            f"--input lists standard input ({STANDARD_INPUT}) {paths.count(STANDARD_INPUT)} times; it can be read once."
        )
    for path in paths:
        if path == STANDARD_INPUT:
            continue
        if is_table(path):
            open_table(path).check(keys)
            continue
        if os.path.isdir(path):
            problems.append(f"--input {path} is a folder; list the files in it.")
            continue
        try:
            open_stream(path).close()
            check_decompressor(path)
            if _suffix(path) == ".parquet":
                check_parquet(path, keys)
        except OSError as failure:
            problems.append(
                f"--input {path} cannot be read: {failure.strerror or failure}. Give the path of a jsonl "
                "file, or - for standard input."
            )
        except ConfigError as failure:
            problems.extend(failure.problems)
    if problems:
        raise ConfigError(problems)


def check_documents(paths: Sequence[str], keys: Sequence[str]) -> None:
    """Checks like `check_inputs`, for programs that need a text under every key.

    Raises:
        ConfigError: an input cannot be read, or has no keys and several are requested.
    """
    check_inputs(paths, keys)
    text = next((path for path in paths if not is_table(path) and layout_of(path) == "text"), None)
    if text is not None and len(keys) > 1:
        raise ConfigError(
            f"--input {text} is plain text, which has no keys, but {len(keys)} are requested: {', '.join(keys)}. Use "
            "one key, or lines of JSON."
        )


def total_bytes(inputs: Sequence[str | InputPart]) -> int | None:
    """Returns the stored size of all inputs or parts in bytes; None if one of them is a pipe."""
    sizes = [_size(entry if isinstance(entry, InputPart) else InputPart(entry)) for entry in inputs]
    return None if None in sizes else sum(size for size in sizes if size is not None)


def blocks(
    inputs: Sequence[str | InputPart], block_bytes: int, separator: str | None = None, keys: Sequence[str] = ("text",)
) -> Iterator[InputBlock]:
    """Cuts the inputs, one after another, into blocks of whole documents.

    Args:
        block_bytes: minimum size of a block; a longer document makes a longer block.
        separator: ends a document in plain text, see `layout_of`.
        keys: columns to read from Parquet files.

    Raises:
        DataError: an input cannot be read or decompressed.
    """
    for entry in inputs:
        part = entry if isinstance(entry, InputPart) else InputPart(entry)
        if is_table(part.path):
            yield from open_table(part.path).blocks(keys, part.start, part.stop, block_bytes)
            continue
        layout = layout_of(part.path, separator)
        if layout == "parquet":
            yield from _rows(part.path, block_bytes, keys)
        elif layout == "text":
            yield from _stream(part.path, block_bytes, layout, separator or LINE_END, separator is None)
        elif part.path == STANDARD_INPUT or is_compressed(part.path) or _regular_size(part.path) is None:
            yield from _stream(part.path, block_bytes, layout)
        else:
            yield from _cut(part, block_bytes)


def _rows(path: str, block_bytes: int, keys: Sequence[str]) -> Iterator[InputBlock]:
    on_disk = os.path.getsize(path)
    start = 0
    for data in parquet_rows(path, keys, block_bytes):
        yield InputBlock(path, start, len(data), data, 0 if start else on_disk, "parquet")
        start += len(data)


def _cut(part: InputPart, block_bytes: int) -> Iterator[InputBlock]:
    path = part.path
    try:
        with open_plain(path, buffering=0) as file:
            size = end = os.fstat(file.fileno()).st_size
            start = _line_end(file, part.start, size) if part.start else 0
            if part.stop is not None and part.stop < size:
                end = _line_end(file, part.stop, size)
            while start < end:
                stop = _block_end(file, start, min(start + block_bytes, end), size)
                _check_length(path, start, stop - start - block_bytes)
                yield InputBlock(path, start, stop - start, None, stop - start)
                start = stop
    except OSError as failure:
        raise unreadable(path, 0, failure) from failure


def _block_end(file: IO[bytes], start: int, target: int, size: int) -> int:
    """Returns the end of a block near `target`; a very long line gets its own block."""
    stop = _line_end(file, target, size)
    if stop - target > _LONG_REST_BYTES:
        for near in range(target, start, -_CUT_SEARCH_BYTES):
            first = max(start, near - _CUT_SEARCH_BYTES)
            file.seek(first)
            newline = read_exactly(lambda size, _: file.read(size), near - first).rfind(b"\n")
            if newline >= 0:
                return first + newline + 1
    return stop


def _line_end(file: IO[bytes], position: int, size: int) -> int:
    """Returns the first offset at or after `position` that follows a newline."""
    position -= 1
    while position < size:
        file.seek(position)
        near = file.read(_CUT_SEARCH_BYTES)
        if not near:
            break
        newline = near.find(b"\n")
        if newline >= 0:
            return position + newline + 1
        position += len(near)
    return size


def _cut_off(held: bytearray, end: int) -> bytearray:
    """Removes and returns everything after `end`."""
    rest = held[end:]
    del held[end:]
    return rest


def _stream(
    path: str, block_bytes: int, layout: str, separator: str = LINE_END, is_by_name: bool = False
) -> Iterator[InputBlock]:
    """Reads lines of JSON, or plain text, once and cuts it after a line or a separator.

    Args:
        is_by_name: only the file's name indicates text, so its first line is checked.
    """
    # Separators are found from the left, as splitting does, so that one which overlaps itself (two newlines) cuts the
    # same documents for every block size.
    pattern = separator_pattern(separator)
    longest = len(separator.encode()) + separator.count(LINE_END)  # with a carriage return before each line feed
    start = consumed = searched = end = 0
    held = bytearray()  # grows in place, where joining chunks would copy a long line
    for chunk, reached in _chunks(path):
        if is_by_name and not held and not start:
            _check_no_json(path, chunk)
        held += chunk
        if separator == LINE_END:
            end = held.rfind(b"\n", searched) + 1 or end
        else:
            for ending in pattern.finditer(held, searched):
                end = ending.end()
        if not end:
            _check_length(path, start, len(held))
            _check_no_bomb(path, start, len(held), reached - consumed)
        searched = max(end, len(held) - longest + 1)
        if not chunk:
            end = len(held)
        if end and (len(held) >= block_bytes or not chunk):
            data, held = held, _cut_off(held, end)
            yield InputBlock(shown_path(path), start, end, as_block_data(data), reached - consumed, layout)
            start, consumed, searched, end = start + end, reached, max(0, searched - end), 0


def _check_length(path: str, start: int, held_bytes: int) -> None:
    """Checks that a document fits into memory: data without line ends is probably not text.

    Raises:
        DataError: the document is too long.
    """
    if held_bytes > _LONGEST_DOCUMENT_BYTES:
        raise DataError(
            f"{shown_path(path)}: the document at byte offset {start} of its text has more than "
            f"{_LONGEST_DOCUMENT_BYTES:,} bytes, but a document must fit into memory several times. Is this a file of "
            "JSON lines (or, with --document-separator, of text)?"
        )


def _check_no_json(path: str, chunk: bytes) -> None:
    """Rejects JSON lines in a .txt file, whose braces and keys would become part of the corpus.

    Args:
        chunk: the file's first bytes.

    Raises:
        DataError: the first line is a JSON object.
    """
    line = chunk.removeprefix(BYTE_ORDER_MARK).lstrip().partition(b"\n")[0]
    if not line.startswith(b"{"):
        return
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return
    raise DataError(
        f"{path}: a .txt file is read as plain text, one document per line, but its first line is a JSON object. "
        r"Rename it to .jsonl, or, if the lines are text, use --document-separator '\n'."
    )


def _check_no_bomb(path: str, start: int, held_bytes: int, input_bytes: int) -> None:
    """Rejects a compressed file that expands a few bytes into one huge document.

    Raises:
        DataError: the file is a decompression bomb.
    """
    if held_bytes > _LONGEST_FREE_BYTES and held_bytes > _LARGEST_RATIO * input_bytes and is_compressed(path):
        raise DataError(
            f"{path}: the document at byte offset {start} of its text has more than {held_bytes:,} bytes, which come "
            f"from {input_bytes:,} bytes of the file: a decompression bomb. If intended, decompress the file first."
        )


def _chunks(path: str) -> Iterator[tuple[bytes, int]]:
    """Yields decompressed chunks of an input, and the number of bytes consumed on disk; the last chunk is empty.

    Raises:
        DataError: the input cannot be read.
    """
    done = 0
    stream = None
    try:
        stream, position = _open(path)
        while chunk := stream.read(_READ_BYTES):
            done += len(chunk)
            yield chunk, position()
        yield b"", position()
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as failure:
        raise unreadable(path, done, failure) from failure
    except Exception as failure:
        if type(failure).__name__ == "ZstdError":
            raise unreadable(path, done, failure) from failure
        raise
    finally:
        if stream is not None and path != STANDARD_INPUT:
            stream.close()


def _open(path: str) -> tuple[Any, Callable[[], int]]:
    """Opens an input for reading; the second value returns the number of bytes consumed on disk."""
    if path == STANDARD_INPUT:
        return sys.stdin.buffer, lambda: 0
    raw = open_stream(path)
    reader = decompressing(cast(BufferedReader, raw), path) if is_compressed(path) else raw
    return reader, (raw.tell if raw.seekable() else lambda: 0)


def _suffix(path: str) -> str:
    return Path(path).suffix.lower()


def _size(part: InputPart) -> int | None:
    if is_table(part.path):
        return open_table(part.path).size_bytes(part.start, part.stop)
    size = _regular_size(part.path)
    return None if size is None else (size if part.stop is None else part.stop) - part.start


def _regular_size(path: str) -> int | None:
    if path == STANDARD_INPUT or not os.path.isfile(path):
        return None
    return os.path.getsize(path)
