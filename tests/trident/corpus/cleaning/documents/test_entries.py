"""Lines keep whatever else they hold."""

from __future__ import annotations

import json

import pytest

from trident.corpus.cleaning.documents.entries import document_of, line_of, read_entries
from trident.corpus.inputs.block import InputBlock


def block_of(data: bytes, layout: str = "jsonl", start: int = 0) -> InputBlock:
    return InputBlock("in", start, len(data), data, 0, layout)


def test_an_unchanged_text_keeps_its_line_byte_for_byte() -> None:
    lines = [
        b'{"id":1e3,  "text" : "a\\u00e9", "n": 123456789012345678901234567890}',
        b'{"text": "\xc3\xa9", "x": NaN}',
    ]
    entries = read_entries(block_of(b"\n".join(lines)), ["text"])
    assert [entry.text for entry in entries] == ["aé", "é"]
    assert [line_of(entry, "text", entry.text or "") for entry in entries] == lines


def test_a_changed_text_keeps_all_other_keys() -> None:
    line = b'{"n": 123456789012345678901234567890, "text": "old", "meta": {"text": "x", "f": 0.1}, "s": "\\ud800"}'
    entry = read_entries(block_of(line), ["text"])[0]
    written = line_of(entry, "text", "n\u00e9w")
    whole = json.loads(line)
    assert list(json.loads(written).items()) == list({**whole, "text": "n\u00e9w"}.items())
    assert document_of(written, "text") == "n\u00e9w"


@pytest.mark.parametrize("line", [b'{"a": {"b": "old", "c": 1}}', b'{"a.b": "old", "a": {"b": "other"}}'])
def test_nested_keys(line: bytes) -> None:
    entry = read_entries(block_of(line), ["a.b"])[0]
    assert entry.text == "old"
    assert line_of(entry, "a.b", "new") == line.replace(b"old", b"new")


def test_bad_lines_are_located_in_the_error() -> None:
    entries = read_entries(
        block_of(b'\xef\xbb\xbf{"text": "a"}\n\nx\n{"text": 1}\n{"text": "\xff"}\n{"text": "b"}'), ["text"]
    )
    assert [entry.text for entry in entries] == ["a", None, None, None, None, "b"]
    found = [(entry.bad.line, entry.bad.offset) for entry in entries if entry.bad]
    assert found == [(2, 18), (3, 20), (4, 42)]
    assert entries[0].raw == b'{"text": "a"}'


def test_plain_text_with_an_invalid_piece() -> None:
    entries = read_entries(block_of(b"one\n\ntwo \xff\n\nthree\n\n", "text"), ["text"], "\n\n")
    assert [entry.text for entry in entries] == ["one", None, "three"]
    assert entries[1].bad is not None and entries[1].bad.offset == 9
    assert line_of(entries[2], "text", "3") == b'{"text": "3"}'
