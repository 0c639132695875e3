"""The texts of a block, however its input writes documents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron.corpus.lines import BadLine, ParsedLines, note, parse_lines
from megatron.corpus.parquet import parquet_texts
from megatron.corpus.sources import Block

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def parse_block(
    block: Block, keys: Sequence[str], skip_bad: bool, separator: str | None = None, hold_long: bool = False
) -> ParsedLines:
    """Takes the texts under `keys` out of every document of a block; plain text has one, which every key gets.

    Args:
        skip_bad: go on after a bad document; else stop at it.
        separator: what ends a document in plain text.
        hold_long: a very long text of a JSON line is given as a `LongText`.

    Raises:
        DataError: the block cannot be read.
    """
    data = block.read()
    if block.layout == "text":
        return _parse_text(data, keys, block.start == 0, skip_bad, separator or "\n")
    if block.layout == "parquet":
        return _parse_rows(parquet_texts(data, keys), keys, skip_bad)
    return parse_lines(data, keys, block.start == 0, skip_bad, hold_long)


def _parse_text(data: bytes, keys: Sequence[str], is_first: bool, skip_bad: bool, separator: str) -> ParsedLines:
    offset = len(_BYTE_ORDER_MARK) if is_first and data.startswith(_BYTE_ORDER_MARK) else 0
    ending = separator.encode()
    pieces = data[offset:].split(ending)
    if not pieces[-1]:
        pieces.pop()
    texts: list[str] = []
    parsed = ParsedLines([texts for _ in keys], len(pieces))
    for number, piece in enumerate(pieces):
        try:
            texts.append(piece.decode("utf-8"))
        except UnicodeDecodeError as failure:
            reason = f"not UTF-8: byte 0x{piece[failure.start]:02x} ({failure.reason})"
            note(parsed, BadLine(number, offset + failure.start, reason))
            if not skip_bad:
                break
        offset += len(piece) + len(ending)
    if len(keys) > 1:  # whoever encodes a list empties it
        parsed.texts = [list(texts) for _ in keys]
    return parsed


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
        what = "bytes that are no" if isinstance(value, bytes) else f"a {type(value).__name__}, not a"
        kind = "is null or missing" if value is None else f"holds {what} text"
        note(parsed, BadLine(number, 0, f"column {wrong!r} {kind} in this row"))
        if not skip_bad:
            break
    return parsed
