"""Running text is cut where nothing is lost, and put together again it is the text."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.corpus.cut_text import pieces, write_pieces
from megatron.errors import DataError, StorageError

PARAGRAPH = "A line of forty letters, the line end in\n" * 100 + "\n"


def test_a_long_text_is_cut_at_blank_lines_and_loses_nothing() -> None:
    text = PARAGRAPH * 12
    found = list(pieces(text.splitlines(keepends=True)))
    assert "".join(found) == text
    assert len(found) == 3 and all(piece.endswith("\n\n") for piece in found), [len(piece) for piece in found]
    assert list(pieces([])) == [] and list(pieces(["one line"])) == ["one line"]


def test_a_text_without_blank_lines_is_cut_as_well() -> None:
    line = "x" * 600_000
    assert list(pieces([line, line, line])) == [line + line, line]


def test_the_separator_of_corpora_is_a_cut_and_no_text() -> None:
    assert list(pieces(["one\n", "<|endoftext|>\n", "<|endoftext|>\n", "two\n"])) == ["one\n", "two\n"]


def test_files_become_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffğ one\r\n<|endoftext|>\n  \n<|endoftext|>\ntwo".encode())
    (tmp_path / "b.txt").write_bytes(b"three")
    write_pieces([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tmp_path / "out.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert texts == ["ğ one\r\n", "two", "three"], "blank documents are left out"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("straße".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt: byte 4 of a block is not UTF-8 .*iconv"):
        write_pieces([str(latin)], tmp_path / "out.jsonl")
    with pytest.raises(StorageError, match=r"gone.txt"):
        write_pieces([str(tmp_path / "gone.txt")], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
