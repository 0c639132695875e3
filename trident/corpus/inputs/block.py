"""A block, the unit of input that is sent to the workers, and the texts in it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

from megatron.errors import DataError
from megatron.files.exact import read_exactly
from megatron.files.formats import FIRST_BYTES, recognized, recognized_file
from megatron.files.plain import open_plain
from trident.corpus.inputs.lines import BYTE_ORDER_MARK, LONG_LINE_BYTES, BadLine, ParsedLines, held_text, parse_lines
from trident.corpus.inputs.parquet import parquet_texts

STANDARD_INPUT = "-"
LINE_END = "\n"  # the default document separator in plain text
_CARRIAGE_RETURN = 0x0D


@dataclass(frozen=True)
class InputBlock:
    """Whole lines of one input; the last line of an input may lack its newline.

    Args:
        source: the input as given.
        start: byte offset in the (uncompressed) input.
        size: bytes of the block.
        data: its bytes, or None to read them from the file `source`.
        input_bytes: bytes of the input file consumed for this block.
        layout: see `layout_of`; `start` and `size` count bytes in Arrow's format for a Parquet file, and bytes of JSON
            lines for a store.
        first_line: number of the input's documents before this block, if a share of the input begins with it and
            newlines cannot be counted.
    """

    source: str
    start: int
    size: int
    data: bytes | None
    input_bytes: int
    layout: str = "jsonl"
    first_line: int = 0

    def read(self) -> bytes:
        """Returns the bytes of the block.

        Raises:
            DataError: the file was truncated or became unreadable.
        """
        if self.data is not None:
            return self.data
        try:
            with open_plain(self.source, buffering=0) as file:
                file.seek(self.start)
                data = read_exactly(lambda size, _: file.read(size), self.size)
        except OSError as failure:
            raise unreadable(self.source, self.start, failure) from failure
        if len(data) != self.size:
            raise DataError(
                f"{self.source}: ended at byte offset {self.start + len(data)} instead of "
                f"{self.start + self.size}: it was truncated while being read. Start again when nothing writes to it."
            )
        return data


def as_block_data(data: bytearray) -> bytes:
    """Converts data to `bytes`, which is faster to process, unless it is too large to copy."""
    return bytes(data) if len(data) < LONG_LINE_BYTES else cast(bytes, data)


def shown_path(path: str) -> str:
    """Returns the name of an input in messages."""
    return "<stdin>" if path == STANDARD_INPUT else path


def unreadable(path: str, offset: int, failure: BaseException) -> DataError:
    """Returns the error for an input that is damaged at a byte offset of its text."""
    return DataError(
        f"{shown_path(path)}: cannot be read past byte offset {offset} of its text: {failure}. "
        + (recognized_file(path) or "The file is damaged or does not match its suffix; download it again")
        + ", or remove it."
    )


def parse_block(
    block: InputBlock,
    keys: Sequence[str],
    skip_bad: bool,
    separator: str | None = None,
    *,
    hold_long: bool = False,
    shows_all: bool = False,
) -> ParsedLines:
    """Extracts the texts under `keys` from every document of a block; plain text has one, for every key.

    Args:
        skip_bad: continue after a bad document; otherwise stop at it.
        separator: ends a document in plain text, a line end if None; see `separator_pattern`.
        hold_long: return very long texts as `LongText`.
        shows_all: keep every bad document, not only the first few.

    Raises:
        DataError: the block cannot be read.
    """
    data = block.read()
    if block.layout == "parquet":
        return _parse_rows(parquet_texts(data, keys), keys, skip_bad, shows_all)
    is_first, is_text = block.start == 0, block.layout == "text"
    if is_text:
        parsed = _parse_text(data, keys, is_first, skip_bad, separator, hold_long, shows_all)
    else:
        parsed = parse_lines(data, keys, is_first, skip_bad, hold_long, shows_all)
    hint = recognized(data[:FIRST_BYTES], as_lines=not is_text) if is_first and parsed.bad else ""
    if hint and parsed.bad[0].line == 0:
        parsed.bad[0] = replace(parsed.bad[0], reason=f"{parsed.bad[0].reason}. {hint}")
    return parsed


def _parse_text(
    data: bytes,
    keys: Sequence[str],
    is_first: bool,
    skip_bad: bool,
    separator: str | None,
    hold_long: bool,
    shows_all: bool,
) -> ParsedLines:
    offset = len(BYTE_ORDER_MARK) if is_first and data.startswith(BYTE_ORDER_MARK) else 0
    texts: list[Any] = []
    parsed = ParsedLines([texts for _ in keys], shows_all=shows_all)
    for number, (start, stop) in enumerate(_text_ranges(data, offset, separator or LINE_END)):
        parsed.lines += 1
        if parsed.bad and not skip_bad:  # only counted
            continue
        try:
            text = data[start:stop].decode()
            texts.append(held_text(text) if hold_long and len(keys) == 1 else text)
        except UnicodeDecodeError as failure:
            reason = f"not UTF-8: byte 0x{data[start + failure.start]:02x} ({failure.reason})"
            parsed.add_bad(BadLine(number, start + failure.start, reason))
    if len(keys) > 1:  # encoding a list empties it
        parsed.texts = [list(texts) for _ in keys]
    return parsed


def separator_pattern(separator: str) -> re.Pattern[bytes]:
    """Returns the pattern of a document separator, whose line ends also match Windows line ends."""
    # The caller handles a carriage return before a leading line feed: a pattern that begins with a literal is fast.
    line_feed_inside = rb"(?!\A)(?<!\r)\\\n"  # escaped; literal after an explicit carriage return
    return re.compile(re.sub(line_feed_inside, rb"\\r?\\n", re.escape(separator.encode())))


def _text_ranges(data: bytes, start: int, separator: str) -> Iterator[tuple[int, int]]:
    """Yields the range of each document in plain text; an empty rest after the last separator is not a document."""
    begins_line = separator.startswith(LINE_END)
    for ending in separator_pattern(separator).finditer(data, start):
        stop = ending.start()
        yield start, stop - (begins_line and stop > start and data[stop - 1] == _CARRIAGE_RETURN)
        start = ending.end()
    if start < len(data):
        yield start, len(data)


def _parse_rows(columns: list[list[Any]], keys: Sequence[str], skip_bad: bool, shows_all: bool) -> ParsedLines:
    rows = len(columns[0])
    parsed = ParsedLines([[] for _ in keys], rows, shows_all=shows_all)
    for number, values in enumerate(zip(*columns, strict=True)):
        wrong = next((key for key, value in zip(keys, values, strict=True) if not isinstance(value, str)), None)
        if wrong is None:
            for texts, value in zip(parsed.texts, values, strict=True):
                texts.append(value)
            continue
        value = values[list(keys).index(wrong)]
        found = "bytes that are not" if isinstance(value, bytes) else f"a value of type {type(value).__name__}, not"
        problem = "is null or missing" if value is None else f"holds {found} text"
        parsed.add_bad(BadLine(number, 0, f"column {wrong!r} {problem} in this row"))
        if not skip_bad:
            break
    return parsed
