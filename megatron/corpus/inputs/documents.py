"""The texts of a block, whatever the layout of its input."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megatron.corpus.inputs.block import BYTE_ORDER_MARK, LINE_END
from megatron.corpus.inputs.input_blocks import InputBlock
from megatron.corpus.inputs.lines import BadLine, ParsedLines, note, parse_lines
from megatron.corpus.inputs.long_lines import LONG_LINE_BYTES
from megatron.corpus.inputs.parquet import parquet_texts
from megatron.tokenizers.encoders.long_text import LongText

_CHECK_BYTES = 4 << 20
_CARRIAGE_RETURN = 0x0D


def parse_block(
    block: InputBlock, keys: Sequence[str], skip_bad: bool, separator: str | None = None, hold_long: bool = False
) -> ParsedLines:
    """Takes the texts under `keys` out of every document of a block; plain text has one, which every key gets.

    Args:
        skip_bad: continue after a bad document; otherwise stop at it.
        separator: what ends a document in plain text; a line's end if None, which may be a Windows line end.
        hold_long: a very long text is given as a `LongText`.

    Raises:
        DataError: the block cannot be read.
    """
    data = block.read()
    if block.layout == "text":
        return _parse_text(data, keys, block.start == 0, skip_bad, separator, hold_long)
    if block.layout == "parquet":
        return _parse_rows(parquet_texts(data, keys), keys, skip_bad)
    return parse_lines(data, keys, block.start == 0, skip_bad, hold_long)


def _parse_text(
    data: bytes, keys: Sequence[str], is_first: bool, skip_bad: bool, separator: str | None, hold_long: bool
) -> ParsedLines:
    offset = len(BYTE_ORDER_MARK) if is_first and data.startswith(BYTE_ORDER_MARK) else 0
    texts: list[Any] = []
    parsed = ParsedLines([texts for _ in keys])
    for number, (start, stop) in enumerate(text_pieces(data, offset, separator)):
        parsed.lines += 1
        if parsed.bad and not skip_bad:  # only counted
            continue
        try:
            is_long = hold_long and len(keys) == 1 and stop - start >= LONG_LINE_BYTES
            texts.append(LongText(_checked_utf8(data, start, stop)) if is_long else data[start:stop].decode())
        except UnicodeDecodeError as failure:
            reason = f"not UTF-8: byte 0x{data[start + failure.start]:02x} ({failure.reason})"
            note(parsed, BadLine(number, start + failure.start, reason))
    if len(keys) > 1:  # encoding a list empties it
        parsed.texts = [list(texts) for _ in keys]
    return parsed


def text_pieces(data: bytes, start: int, separator: str | None) -> Iterator[tuple[int, int]]:
    """Where each document of plain text begins and stops; an empty rest after the last separator is not a document.

    Args:
        separator: what ends a document; None is a line's end, before which a carriage return is left out.
    """
    ending = (separator or LINE_END).encode()
    while (stop := data.find(ending, start)) >= 0:
        yield start, stop - (separator is None and stop > start and data[stop - 1] == _CARRIAGE_RETURN)
        start = stop + len(ending)
    if start < len(data):
        yield start, len(data)


def _checked_utf8(data: bytes, start: int, stop: int) -> bytearray:
    """A copy of a stretch of bytes.

    Raises:
        UnicodeDecodeError: it is not UTF-8; `start` of the error counts from the beginning of the stretch.
    """
    view = memoryview(data)
    first = start
    while first < stop:
        last = min(first + _CHECK_BYTES, stop)
        while last < stop and last > first + 1 and data[last] & 0xC0 == 0x80:
            last -= 1
        try:
            str(view[first:last], "utf-8")
        except UnicodeDecodeError as failure:
            shift = first - start
            raise UnicodeDecodeError(
                "utf-8", b"", shift + failure.start, shift + failure.end, failure.reason
            ) from failure
        first = last
    return bytearray(view[start:stop])


def _parse_rows(columns: list[list[Any]], keys: Sequence[str], skip_bad: bool) -> ParsedLines:
    rows = len(columns[0])
    parsed = ParsedLines([[] for _ in keys], rows)
    for number, values in enumerate(zip(*columns, strict=True)):
        wrong = next((key for key, value in zip(keys, values, strict=True) if not isinstance(value, str)), None)
        if wrong is None:
            for texts, value in zip(parsed.texts, values, strict=True):
                texts.append(value)
            continue
        value = values[list(keys).index(wrong)]
        what = "bytes that are not" if isinstance(value, bytes) else f"a {type(value).__name__}, not a"
        kind = "is null or missing" if value is None else f"holds {what} text"
        note(parsed, BadLine(number, 0, f"column {wrong!r} {kind} in this row"))
        if not skip_bad:
            break
    return parsed
