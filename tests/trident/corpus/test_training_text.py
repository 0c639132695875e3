"""Checks that a dataset becomes a tokenizer and token files once, whatever its form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.errors import ConfigError, DataError, StorageError
from megatron.tokenizers.tokenizer import TokenizerChoice, build_tokenizer
from trident.corpus import training_text
from trident.corpus.training_text import ROBERTA_TOKENS, prepare_text, split_documents, write_documents

TEXTS = [f"the {color} house has {number} windows" for color in ("red", "blue") for number in ("two", "four", "six")]


@pytest.fixture
def lines(tmp_path: Path) -> Path:
    """A text file with a document on each line."""
    path = tmp_path / "houses.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


def decoded(folder: Path, tokenizer: str) -> list[str]:
    """The documents of the token files as text."""
    codec = build_tokenizer(TokenizerChoice("HFTokenizer", None, None, tokenizer))
    documents = IndexedDataset(str(folder / "train_text_document"))
    return [codec.decode(documents[number].tolist()) for number in range(len(documents))]


def test_each_line_of_a_text_file_is_a_document(lines: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    prepare_text(str(lines), None, folder)
    tokenizer = folder / "tokenizer.json"
    assert decoded(folder, str(tokenizer)) == TEXTS
    added = json.loads(tokenizer.read_text())["added_tokens"]
    assert [(token["id"], token["content"]) for token in added] == list(enumerate(ROBERTA_TOKENS))


def test_what_is_there_is_kept_and_a_changed_dataset_is_refused(lines: Path, tmp_path: Path) -> None:
    folder = tmp_path / "prepared"
    prepare_text(str(lines), None, folder)
    made_at = (folder / "train_text_document.bin").stat().st_mtime_ns
    prepare_text(str(lines), None, folder)
    assert (folder / "train_text_document.bin").stat().st_mtime_ns == made_at
    lines.write_text("\n".join(TEXTS[:2]) + "\n")
    with pytest.raises(ConfigError, match="houses.txt changed since it was prepared in .*prepared"):
        prepare_text(str(lines), None, folder)
    assert decoded(folder, str(folder / "tokenizer.json")) == TEXTS


def test_a_text_that_is_too_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "word.txt"
    path.write_text("a\n")
    with pytest.raises(DataError, match="word.txt: the text is too short to train a tokenizer"):
        prepare_text(str(path), None, tmp_path / "prepared")


def test_jsonl_is_read_with_a_given_tokenizer(lines: Path, tmp_path: Path) -> None:
    prepare_text(str(lines), None, tmp_path / "first")
    tokenizer = str(tmp_path / "first" / "tokenizer.json")
    rows = tmp_path / "houses.jsonl"
    rows.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    prepare_text(str(rows), tokenizer, tmp_path / "second")
    assert decoded(tmp_path / "second", tokenizer) == TEXTS
    assert not (tmp_path / "second" / "tokenizer.json").exists()


def test_without_a_dataset_the_texts_of_python_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def write(path: Path, size: int) -> None:
        asked.append(size)
        path.write_text(json.dumps({"text": TEXTS[0]}) + "\n")

    monkeypatch.setattr(training_text, "write_demo_corpus", write)
    prepare_text(None, None, tmp_path)
    assert asked == [10_000_000]
    assert decoded(tmp_path, str(tmp_path / "tokenizer.json")) == TEXTS[:1]


@pytest.mark.parametrize("name", ["missing.txt", "./folder", "texts/*.jsonl"])
def test_a_dataset_that_is_not_there_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=name.replace("*", r"\*")):
        prepare_text(name, None, tmp_path / "prepared")


PARAGRAPH = "A line of forty letters, the line end in\n" * 100 + "\n"


def test_a_long_text_is_cut_at_blank_lines_and_loses_nothing() -> None:
    text = PARAGRAPH * 12
    found = list(split_documents(text.splitlines(keepends=True)))
    assert "".join(found) == text
    assert len(found) == 3 and all(piece.endswith("\n\n") for piece in found), [len(piece) for piece in found]
    assert list(split_documents([])) == [] and list(split_documents(["one line"])) == ["one line"]


def test_a_text_without_blank_lines_is_cut_as_well() -> None:
    line = "x" * 600_000
    assert list(split_documents([line, line, line])) == [line + line, line]


def test_the_separator_of_corpora_is_a_cut_and_no_text() -> None:
    assert list(split_documents(["one\n", "<|endoftext|>\n", "<|endoftext|>\n", "two\n"])) == ["one\n", "two\n"]


def test_files_become_jsonl(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("\ufeffğ one\r\n<|endoftext|>\n  \n<|endoftext|>\ntwo".encode())
    (tmp_path / "b.txt").write_bytes(b"three")
    write_documents([str(tmp_path / "a.txt"), str(tmp_path / "b.txt")], tmp_path / "out.jsonl")
    texts = [json.loads(line)["text"] for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert texts == ["ğ one\r\n", "two", "three"], "blank documents are left out"


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    latin = tmp_path / "latin.txt"
    latin.write_bytes("straße".encode("latin-1"))
    with pytest.raises(DataError, match=r"latin.txt: byte 4 of a block is not UTF-8 .*iconv"):
        write_documents([str(latin)], tmp_path / "out.jsonl")
    with pytest.raises(StorageError, match=r"gone.txt"):
        write_documents([str(tmp_path / "gone.txt")], tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()
