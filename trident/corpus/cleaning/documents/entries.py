"""The documents of a block with their original lines, whose other keys are kept."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from trident.corpus.inputs.block import InputBlock, parse_block
from trident.corpus.inputs.lines import BadLine, is_blank, parse_lines, split_lines
from trident.corpus.inputs.parquet import parquet_texts


@dataclass(frozen=True)
class DocumentEntry:
    """One input document.

    Args:
        text: its text; None if it is bad or blank.
        raw: its JSON line without the newline; None for other layouts.
        others: other values for the output's line, if `raw` is None.
        bad: its fault; `offset` is inside the block.
    """

    text: str | None
    raw: bytes | None = None
    others: dict[str, Any] = field(default_factory=dict)
    bad: BadLine | None = None


def read_entries(block: InputBlock, keys: Sequence[str], separator: str | None = None) -> list[DocumentEntry]:
    """Returns all documents of a block, bad ones included; a blank line is an entry without text or fault.

    Args:
        keys: the key of the text, then other columns of Parquet files to keep.
        separator: ends a document in plain text; a line end if None.

    Raises:
        DataError: the block cannot be read.
    """
    data = block.read()
    parsed = parse_block(replace(block, data=data), keys[:1], True, separator, shows_all=True)
    lines: Sequence[bytes | None] = [None] * parsed.lines
    others: Sequence[dict[str, Any]] = [{}] * parsed.lines
    if block.layout == "jsonl":
        lines = [bytes(line).removesuffix(b"\n") for line in split_lines(data, block.start == 0)[0]]
    elif block.layout == "parquet" and keys[1:]:
        columns = parquet_texts(data, keys[1:])
        others = [dict(zip(keys[1:], values, strict=True)) for values in zip(*columns, strict=True)]
    bad = {entry.line: entry for entry in parsed.bad}
    texts = iter(parsed.texts[0])
    return [
        DocumentEntry(None, line, others[number], bad.get(number))
        if number in bad or (line is not None and is_blank(line))
        else DocumentEntry(next(texts), line, others[number])
        for number, line in enumerate(lines)
    ]


def line_of(entry: DocumentEntry, key: str, text: str) -> bytes:
    """The line of JSON, without its newline, that holds an entry with `text` as its text.

    A line whose text did not change is the line that was read, byte for byte; else all other keys keep their order and
    their values (numbers of any size).
    """
    if entry.raw is None:
        return _written({key: text, **entry.others})
    if text == entry.text:
        return entry.raw
    whole = json.loads(entry.raw)
    _put(whole, key, text)
    return _written(whole)


def document_of(line: bytes, key: str) -> str:
    """The text in a line that `line_of` gave."""
    return parse_lines(line, [key], False, True).texts[0][0]


def _put(whole: dict[str, Any], key: str, text: str) -> None:
    """Replaces the text where `parse_lines` reads it: under the key itself, or under its parts."""
    if key not in whole:
        *folders, key = key.split(".")
        for name in folders:
            whole = whole[name]
    whole[key] = text


def _written(whole: dict[str, Any]) -> bytes:
    # A lone surrogate, which another key may hold, becomes its escape, which JSON allows.
    return json.dumps(whole, ensure_ascii=False, default=str).encode("utf-8", "backslashreplace")
