"""Blocks: their bytes, from memory or from the file, and files that changed since they were cut."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.tokenizers.encoders.long_text import LongText
from trident.corpus.inputs import lines
from trident.corpus.inputs.block import InputBlock, as_block_data, parse_block, shown_path
from trident.corpus.inputs.input_blocks import blocks
from trident.corpus.inputs.lines import LONG_LINE_BYTES, BadLines


def test_a_block_gives_its_bytes_from_memory_or_from_the_file(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"0123456789")
    assert InputBlock(str(path), 3, 4, None, 4).read() == b"3456"
    assert InputBlock("gone", 3, 4, b"held", 4).read() == b"held"


def test_a_file_that_became_shorter_or_vanished_is_named(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    path.write_bytes(b"0123456789")
    with pytest.raises(DataError, match=r"in\.jsonl: ended at byte offset 10 instead of 12"):
        InputBlock(str(path), 3, 9, None, 9).read()
    with pytest.raises(DataError, match=r"gone: cannot be read past byte offset 3"):
        InputBlock(str(tmp_path / "gone"), 3, 9, None, 9).read()


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("in.jsonl", b'[{"text": "a"},\n{"text": "b"}]\n', r"jsonl:1: byte offset 15: not JSON.* a JSON array\."),
        ("in.jsonl", b'[{"text": "a"}]\n', r"holds a JSON array, not an object\. The file looks like a JSON array\."),
        ("in.jsonl", '{"text": "a"}\n'.encode("utf-16"), r"not UTF-8: byte 0xff .*text in UTF-16\."),
        ("in.txt", "a\n".encode("utf-16"), r"not UTF-8: byte 0xff .*text in UTF-16\."),
        ("in.jsonl", gzip.compress(b"{}", mtime=0), r"looks like a gzip file\."),
        ("in.jsonl.bz2", gzip.compress(b"{}", mtime=0), r"cannot be read past byte offset 0 .*like a gzip file\."),
    ],
)
def test_a_file_of_another_format_is_recognized(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(DataError, match=words) as failure:
        for each in blocks([str(path)], 1 << 20):
            parsed = parse_block(each, ["text"], False)
            BadLines(are_skipped=False).take(parsed.bad, 1, each.source, each.start, 0)
    assert "rename the file" not in str(failure.value) and "Fix the line" not in str(failure.value)


def test_only_short_data_are_copied() -> None:
    short, long = bytearray(b"abc"), bytearray(LONG_LINE_BYTES)
    assert type(as_block_data(short)) is bytes and as_block_data(short) == b"abc"
    assert as_block_data(long) is long


def test_standard_input_has_a_name() -> None:
    assert shown_path("-") == "<stdin>" and shown_path("a.jsonl") == "a.jsonl"


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
    monkeypatch.setattr(lines, "LONG_LINE_BYTES", 4)
    text = text_block("ab\n字漢字é".encode())
    jsonl = InputBlock("a.jsonl", 0, 0, b'{"text": "ab"}\n{"text": "\\u5b57\\u6f22\\u5b57\\u00e9"}\n', 0)
    for one in (text, jsonl):
        short, long = parse_block(one, ("text",), True, hold_long=True).texts[0]
        assert short == "ab" and isinstance(long, LongText) and long.whole() == "字漢字é"
        assert parse_block(one, ("text",), True).texts[0] == ["ab", "字漢字é"]


def test_layouts_are_distinguished() -> None:
    line = b'{"text": "a"}\n'
    assert parse_block(InputBlock("a.jsonl", 0, len(line), line, 0), ("text",), True).texts == [["a"]]
