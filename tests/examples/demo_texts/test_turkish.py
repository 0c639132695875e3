"""Documents, held-out documents and questions in Turkish: distinct, repeatable, and with every letter intact."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from examples.demo_texts.turkish import questions, write_turkish_corpus
from megatron.errors import StorageError

COUNT = 500


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("turkish")
    made = write_turkish_corpus(
        folder / "new" / "tr.jsonl", COUNT, 7, held_out=folder / "held-out.txt", pairs=folder / "pairs.jsonl"
    )
    assert (made.documents, made.held_out, made.questions) == (COUNT, COUNT / 10, len(questions()))
    files = (folder / "new" / "tr.jsonl", folder / "held-out.txt", folder / "pairs.jsonl")
    assert made.size_bytes == sum(path.stat().st_size for path in files)
    return folder


def texts(path: Path) -> list[str]:
    return [json.loads(line)["text"] for line in path.read_text().splitlines()]


def test_documents_are_distinct_and_of_three_kinds(folder: Path) -> None:
    found = texts(folder / "new" / "tr.jsonl")
    assert len(set(found)) == COUNT
    kinds = {json.loads(line)["src"] for line in (folder / "new" / "tr.jsonl").read_text().splitlines()}
    assert kinds == {"turkish story", "turkish description", "turkish talk"}
    assert set("İIıiğşçöüŞÇÖÜ“”’'") - {"’"} < set("".join(found))


def test_the_same_seed_gives_the_same_bytes_and_more_documents_begin_alike(folder: Path, tmp_path: Path) -> None:
    write_turkish_corpus(tmp_path / "again", COUNT, 7)
    whole = (folder / "new" / "tr.jsonl").read_bytes()
    assert (tmp_path / "again").read_bytes() == whole
    write_turkish_corpus(tmp_path / "fewer", 20, 7)
    assert whole.startswith((tmp_path / "fewer").read_bytes())
    write_turkish_corpus(tmp_path / "other", 20, 8)
    assert not whole.startswith((tmp_path / "other").read_bytes())


def test_a_place_that_cannot_be_written_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path}.*directory"):
        write_turkish_corpus(tmp_path / "tr.jsonl", 1, 7, held_out=tmp_path)
    assert not (tmp_path / "tr.jsonl").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=f"{tmp_path}/file"):
        write_turkish_corpus(tmp_path / "file" / "tr.jsonl", 1, 7)
