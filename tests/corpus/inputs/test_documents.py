"""The texts of a block, from lines of JSON, Parquet rows and plain text."""

from __future__ import annotations

import pytest

from megatron.corpus.inputs import documents
from megatron.corpus.inputs.block import InputBlock
from megatron.corpus.inputs.documents import parse_block
from megatron.tokenizers.encoders.long_text import LongText


def text_block(data: bytes, start: int = 0) -> InputBlock:
    return InputBlock("a.txt", start, len(data), data, len(data), "text")


def test_plain_text_is_cut_at_the_separator() -> None:
    parsed = parse_block(text_block(b"one\n\ntwo\nlines\n\nlast"), ("text", "copy"), True, "\n\n")
    assert parsed.texts == [["one", "two\nlines", "last"]] * 2 and parsed.lines == 3
    assert parsed.texts[0] is not parsed.texts[1]


def test_a_byte_order_mark_is_dropped_at_the_start_only() -> None:
    data = "\ufeffa\n\ufeffb".encode()
    assert parse_block(text_block(data), ("text",), True).texts == [["a", "\ufeffb"]]
    assert parse_block(text_block(data, start=9), ("text",), True).texts == [["\ufeffa", "\ufeffb"]]


@pytest.mark.parametrize("skip_bad", [True, False])
def test_bytes_that_are_not_utf8_are_located(skip_bad: bool) -> None:
    parsed = parse_block(text_block(b"good\nb\xffd\nmore"), ("text",), skip_bad)
    assert [(bad.line, bad.offset) for bad in parsed.bad] == [(1, 6)] and "0xff" in parsed.bad[0].reason
    assert parsed.texts[0] == (["good", "more"] if skip_bad else ["good"]) and parsed.lines == 3


def test_a_long_text_stays_utf8(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "LONG_LINE_BYTES", 5)
    monkeypatch.setattr(documents, "_CHECK_BYTES", 3)
    short, long = parse_block(text_block("ab\n字漢字é".encode()), ("text",), True, hold_long=True).texts[0]
    assert short == "ab" and isinstance(long, LongText) and long.whole() == "字漢字é"


def test_layouts_are_distinguished() -> None:
    line = b'{"text": "a"}\n'
    assert parse_block(InputBlock("a.jsonl", 0, len(line), line, 0), ("text",), True).texts == [["a"]]
