"""The files of tasks, and the errors of invalid ones."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.errors import DataError
from tests.trident.evaluate.fakes import EOD, ByteTokenizer
from trident.evaluate import item_files
from trident.evaluate.item_files import JsonRow, checked_text, read_documents, read_lines, read_rows, token_prefix


def test_rows_of_a_file_with_their_places(tmp_path: Path) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\r\n\n{"text": "two"}\n')
    rows = list(read_rows(path))
    assert [row.text("text") for row in rows] == ["one", "two"]
    assert rows[1].source == f"{path} line 3"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"text": 1', r"line 1 is not JSON: .*Write one JSON object per line"),
        (b'{"a": 1}\n[1, 2]', r"line 2 must be a JSON object, not \[1, 2\]"),
        (b'{"a": "\xff"}', r"line 1 is not UTF-8 text: invalid start byte at byte 7"),
        (b"[" * 100_000, "line 1 is nested too deeply"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, content: bytes, says: str) -> None:
    path = tmp_path / "items.jsonl"
    path.write_bytes(content)
    with pytest.raises(DataError, match=says):
        list(read_rows(path))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere.txt cannot be read: No such file"):
        list(read_documents(tmp_path / "nowhere.txt", "text", ByteTokenizer()))
    with pytest.raises(DataError, match=r"nowhere.jsonl cannot be read: No such file"):
        list(read_rows(tmp_path / "nowhere.jsonl"))


def test_a_line_or_text_that_is_too_long_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "long.txt"
    path.write_text("a" * 50)
    monkeypatch.setattr(item_files, "MOST_LINE_BYTES", 40)
    monkeypatch.setattr(item_files, "MOST_TEXT_BYTES", 45)
    with pytest.raises(DataError, match="line 1 is longer than 40 bytes"):
        list(read_lines(path))
    with pytest.raises(DataError, match="holds more than 45 bytes"):
        list(read_documents(path, "text", ByteTokenizer()))


def test_a_text_under_the_first_key_that_is_there() -> None:
    row = JsonRow("items line 1", {"query": "why?", "n": 3})
    assert row.text("question", "query") == "why?"
    with pytest.raises(DataError, match=r'items line 1 has no "text" or "prompt"\. Its keys: \'query\', \'n\''):
        row.text("text", "prompt")
    with pytest.raises(DataError, match=r'"n" must be a text, not 3'):
        row.text("n")
    with pytest.raises(DataError, match=r"holds U\+D800, half of a surrogate pair"):
        checked_text("a\ud800", "it")


def test_documents_of_each_kind_of_file(tmp_path: Path) -> None:
    tokenizer = ByteTokenizer()
    (tmp_path / "plain.txt").write_text("one\ntwo\n")
    (tmp_path / "lines.jsonl").write_text('{"body": "one"}\n{"body": "two"}\n')
    with IndexedWriter(str(tmp_path / "tokens"), np.uint16) as writer:
        writer.add_document([np.array([111, 110, 101, EOD])])
        writer.add_document([np.array([116, 119]), np.array([111, EOD])])
    (plain,) = read_documents(tmp_path / "plain.txt", "text", tokenizer)
    assert (plain.text, plain.ids(tokenizer)) == ("one\ntwo\n", list(b"one\ntwo\n"))
    assert [document.text for document in read_documents(tmp_path / "lines.jsonl", "body", tokenizer)] == ["one", "two"]
    for name in ("tokens", "tokens.bin", "tokens.idx"):
        assert token_prefix(tmp_path / name) == str(tmp_path / "tokens")
        documents = list(read_documents(tmp_path / name, "text", tokenizer))
        assert [document.ids(tokenizer) for document in documents] == [[*b"one"], [*b"two"]]
    assert token_prefix(tmp_path / "plain.txt") is None


def test_tokens_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(str(tmp_path / "tokens"), np.uint16) as writer:
        writer.add_document([np.array([5, 300])])
    with pytest.raises(DataError, match="document 0 holds the token 300, and the tokenizer has 257"):
        list(read_documents(tmp_path / "tokens", "text", ByteTokenizer()))
    fields = {"format": "megatron-corpus-sidecar", "format_version": 1, "documents": 1, "empty": 0, "skipped": 0}
    fields |= {"sequences": 1, "tokens": 2, "append_eod": True, "versions": {}, "sources": []}
    fields["tokenizer"] = {"name": "other", "fingerprint": "f00", "vocab_size": 999, "eod_id": 0}
    (tmp_path / "tokens.json").write_text(json.dumps(fields))
    with pytest.raises(DataError, match=r"with another tokenizer \(other, fingerprint f00, 999 tokens\)"):
        list(read_documents(tmp_path / "tokens", "text", ByteTokenizer()))
