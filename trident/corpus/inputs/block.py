"""A block: a stretch of an input, as it passes from the code that cuts inputs to the workers, and the texts in it."""

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
LINE_END = "\n"  # what ends a document in plain text, unless another separator is given
_CARRIAGE_RETURN = 0x0D


@dataclass(frozen=True)
class InputBlock:
    """Whole lines of one input; the last line of an input may lack its newline.

    Args:
        source: the input as it was given.
        start: byte offset in the (uncompressed) input.
        size: bytes of the block.
        data: its bytes, or None when they are to be read from the file `source`.
        input_bytes: bytes of the input file that were consumed for this block.
        layout: how it holds documents, see `layout_of`; of a Parquet file `start` and `size` count rows' bytes in
            Arrow's form, of a store the bytes of its rows as lines of JSON.
        first_line: number of the input's documents before this block, where a share of the input begins with it and
            they are not found by counting newlines.
    """

    source: str
    start: int
    size: int
    data: bytes | None
    input_bytes: int
    layout: str = "jsonl"
    first_line: int = 0

    def read(self) -> bytes:
        """The bytes of the block.

        Raises:
            DataError: the file has become shorter or unreadable since it was cut.
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
                f"{self.start + self.size}: it was truncated while it was read. Start again when nothing writes to it."
            )
        return data


def as_block_data(data: bytearray) -> bytes:
    """Bytes as a block carries them: copied to `bytes`, which is faster to work on, unless there are too many."""
    return bytes(data) if len(data) < LONG_LINE_BYTES else cast(bytes, data)


def shown_path(path: str) -> str:
    """How an input is called in messages."""
    return "<stdin>" if path == STANDARD_INPUT else path


def unreadable(path: str, offset: int, failure: BaseException) -> DataError:
    """The error of an input that is damaged at a byte offset of its text."""
    return DataError(
        f"{shown_path(path)}: cannot be read past byte offset {offset} of its text: {failure}. "
        + (recognized_file(path) or "The file is damaged or not of the format in its suffix; fetch it again")
        + ", or leave it out."
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
    """Takes the texts under `keys` out of every document of a block; plain text has one, which every key gets.

    Args:
        skip_bad: continue after a bad document; otherwise stop at it.
        separator: what ends a document in plain text, a line's end if None; see `separator_pattern`.
        hold_long: a very long text is given as a `LongText`.
        shows_all: keep every bad document, not the first few.

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
    words = recognized(data[:FIRST_BYTES], as_lines=not is_text) if is_first and parsed.bad else ""
    if words and parsed.bad[0].line == 0:
        parsed.bad[0] = replace(parsed.bad[0], reason=f"{parsed.bad[0].reason}. {words}")
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
    for number, (start, stop) in enumerate(_text_pieces(data, offset, separator or LINE_END)):
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
    """What ends a document in plain text: a separator whose line ends may also be those of Windows.

    A carriage return before a leading line feed is left to the caller: a pattern that begins with a literal is fast.
    """
    line_feed_inside = rb"(?!\A)(?<!\r)\\\n"  # escaped; after a given carriage return it is taken literally
    return re.compile(re.sub(line_feed_inside, rb"\\r?\\n", re.escape(separator.encode())))


def _text_pieces(data: bytes, start: int, separator: str) -> Iterator[tuple[int, int]]:
    """Where each document of plain text begins and stops; an empty rest after the last separator is not a document."""
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
        what = "bytes that are not" if isinstance(value, bytes) else f"a {type(value).__name__}, not a"
        kind = "is null or missing" if value is None else f"holds {what} text"
        parsed.add_bad(BadLine(number, 0, f"column {wrong!r} {kind} in this row"))
        if not skip_bad:
            break
    return parsed
