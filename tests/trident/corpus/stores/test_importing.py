"""Files are imported into a document store completely or not at all, and once."""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.stores.document_store import open_store
from megatron.data.stores.store_rows import store_fingerprint
from megatron.errors import ConfigError, DataError
from tests.data.databases import Database, numbered
from tests.trident.corpus.stores.imports import jsonl, problems_of, put, texts_of
from trident.corpus.stores import importing as store


def test_files_are_imported_in_order_and_once(database: Database, tmp_path: Path) -> None:
    first = jsonl(tmp_path / "a.jsonl", ["a0", "a1 ğ", "a2\n"])
    packed = tmp_path / "b.jsonl.gz"
    packed.write_bytes(gzip.compress(b'{"text": "b0"}\n'))
    results = put(database, "web", first, str(packed))
    assert [(one.record.first_idx, one.record.num_docs) for one in results if one.record] == [(0, 3), (3, 1)]
    copy = tmp_path / "copy of a.jsonl"
    copy.write_bytes(Path(first).read_bytes())
    assert [one.record for one in put(database, "web", first, str(copy), str(packed))] == [None] * 3
    assert texts_of(database, "web") == ["a0", "a1 ğ", "a2\n", "b0"]
    put(database, "news", first)
    store = open_store(database.base)
    assert [one.name for one in store.collections] == ["web", "news"] and store[4] == "a0" and len(store) == 7
    assert problems_of(database) == {"web": [], "news": []}
    before = store_fingerprint(store)
    put(database, "news", jsonl(tmp_path / "c.jsonl", ["c"]))
    assert store_fingerprint(open_store(database.base)) != before


def test_the_schema_is_that_of_the_original_project(database: Database, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["clean"], raw="dirty")
    put(database, "web", path, original_key="raw")
    put(database, "web", path)  # without the original it is another import
    if database.kind == "sqlite":
        connection = sqlite3.connect(database.path)
        rows = connection.execute("SELECT _id, idx, form, filt_text FROM web").fetchall()
        assert rows == [(1, 0, "dirty", "clean"), (2, 1, None, "clean")]
        assert connection.execute("SELECT collection_name, num_docs FROM meta_info").fetchall() == [("web", 2)]
    else:
        found = list(database.mongo()["web"].find({}, {"_id": 0}))
        assert found == [{"idx": 0, "form": "dirty", "filt_text": "clean"}, {"idx": 1, "filt_text": "clean"}]
        assert list(database.mongo()["meta_info"].find({}, {"_id": 0})) == [{"collection_name": "web", "num_docs": 2}]


def test_a_bad_line_rolls_back_its_file(database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = jsonl(tmp_path / "a.jsonl", ["a"])
    bad = jsonl(tmp_path / "b.jsonl", ["b0", None, "b2"])
    with pytest.raises(DataError, match=r"b\.jsonl:2: .*holds a JSON null.*Nothing of this file was imported"):
        put(database, "web", good, bad)
    assert texts_of(database, "web") == ["a"] and problems_of(database) == {"web": []}
    assert put(database, "web", bad, skip_bad_lines=True)[0].skipped == 1
    assert "b.jsonl:2: byte offset" in capsys.readouterr().err
    assert texts_of(database, "web") == ["a", "b0", "b2"]


def test_a_changed_file_is_not_added_by_default(database: Database, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["a"])
    put(database, "web", path)
    jsonl(tmp_path / "a.jsonl", ["a", "b"])
    with pytest.raises(
        ConfigError, match=r"a\.jsonl was imported before \(1 documents from idx 0\).*--on-changed-file"
    ):
        put(database, "web", path)
    put(database, "web", path, adds_changed=True)
    assert texts_of(database, "web") == ["a", "a", "b"]


def test_standard_input_is_recognized_too(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    for expected in (1, None):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b'{"text": "x"}\n')))
        record = put(database, "web", "-")[0].record
        assert (record and record.num_docs) == expected
    assert texts_of(database, "web") == ["x"]


def test_text_files_and_empty_ones(database: Database, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\n")
    (tmp_path / "none.jsonl").write_text("")
    put(database, "web", str(tmp_path / "a.txt"), str(tmp_path / "none.jsonl"), document_separator="\n\n")
    assert texts_of(database, "web") == ["one", "two"]


def test_a_missing_file_is_reported_before_anything_is_written(database: Database, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.jsonl cannot be read"):
        put(database, "web", jsonl(tmp_path / "a.jsonl", ["a"]), str(tmp_path / "absent.jsonl"))
    with pytest.raises(DataError, match="it has no collections"):
        open_store(database.base)


def test_foreign_collections_are_continued_or_left_alone(database: Database, tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["new"])
    database.write({"web": numbered(["old"]), "other": []}, counted={"web": 1, "other": 0})
    put(database, "web", path)
    put(database, "other", path)
    assert texts_of(database, "web", "other") == ["old", "new", "new"]
    if database.kind == "sqlite":
        connection = sqlite3.connect(database.path)
        connection.execute("UPDATE meta_info SET num_docs = 5 WHERE collection_name = 'web'")
        connection.commit()
    else:
        database.mongo()["meta_info"].update_one({"collection_name": "web"}, {"$set": {"num_docs": 5}})
    with pytest.raises(DataError, match=r"meta_info counts 5 documents in collection 'web', but its last idx is 1"):
        put(database, "web", jsonl(tmp_path / "b.jsonl", ["newer"]))


def test_a_file_that_becomes_unreadable(
    sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*given: Any, **options: Any) -> Any:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(store, "open_plain", refuse)
    with pytest.raises(DataError, match=r"a\.jsonl cannot be read: Input/output error"):
        put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", ["a"]))


def test_the_schema_of_dsgpt2_is_imported_without_flags(sqlite_database: Database, tmp_path: Path) -> None:
    lines = [{"_id": {"$oid": "5f"}, "idx": 7, "form": " Ham\n", "filt_text": "Ham"}, {"form": "b", "filt_text": "B"}]
    path = tmp_path / "web.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours = tmp_path / "ours.jsonl"
    ours.write_text('{"text": "mine", "filt_text": "not this"}\n')
    alone = tmp_path / "alone.jsonl"
    alone.write_text('{"filt_text": "alone"}\n')
    assert [one.record is None for one in put(sqlite_database, "web", *map(str, (path, ours, alone, path)))] == [
        False, False, False, True,
    ]  # fmt: skip
    assert texts_of(sqlite_database, "web") == ["Ham", "B", "mine", "alone"]
    with sqlite3.connect(sqlite_database.path) as connection:
        assert connection.execute("SELECT form FROM web ORDER BY idx").fetchall() == [
            (" Ham\n",),
            ("b",),
            (None,),
            (None,),
        ]
    with pytest.raises(DataError, match=r"web\.jsonl:1: .*key 'text'"):
        put(sqlite_database, "news", str(path), key="text")


def test_two_imports_of_one_file_at_the_same_time_add_it_once(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("".join(json.dumps({"text": f"document {number}"}) + "\n" for number in range(3000)))
    tool = Path(__file__).resolve().parents[4] / "tools" / "corpus" / "corpus_store.py"
    words = [sys.executable, str(tool), "import", str(source), "--config", "sqlite:///s.db", "--collection", "web"]
    both = [subprocess.Popen(words, cwd=tmp_path, stderr=subprocess.PIPE) for _ in range(2)]
    said = [process.communicate(timeout=120)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert len(open_store(f"sqlite:///{tmp_path}/s.db?table=web")) == 3000
