"""Adding documents to a store: all of a file or nothing, whatever happens."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.document_store import open_store
from megatron.data.stores.mongodb import translated_errors
from megatron.errors import ConfigError, DataError, StorageError
from tests.data.databases import Database
from tests.trident.corpus.stores.imports import jsonl, problems_of, put, texts_of
from trident.corpus.stores import writers as store_writers
from trident.corpus.stores.importing import ImportOptions, import_files
from trident.corpus.stores.writers import open_writer
from trident.corpus.workers.progress_line import ProgressLine

ROOT = Path(__file__).resolve().parents[4]


@pytest.mark.parametrize("name", ["", "meta_info", "sqlite_master", "a$b"])
def test_invalid_collection_names(name: str) -> None:
    with pytest.raises(ConfigError, match=f"--collection {name!r}".replace("$", r"\$")):
        open_writer(StoreAddress.of("sqlite:///x.db"), name)


def test_a_foreign_table_is_not_a_collection(sqlite_database: Database, tmp_path: Path) -> None:
    connection = sqlite3.connect(sqlite_database.path)
    connection.execute("CREATE TABLE web (text TEXT)")
    connection.commit()
    with pytest.raises(
        DataError, match=r"'web' is not a collection of a document store: it lacks 'idx', 'form', 'filt_text'"
    ):
        put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", ["a"]))
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("web",)]


KILLED = """
import os, signal, sys
sys.path.insert(0, {root!r})
from trident.corpus.stores import importing as store
from trident.corpus.stores import writers as store_writers
from trident.corpus.workers.progress_line import ProgressLine
from megatron.data.stores.address import StoreAddress
writer = store_writers.open_writer(StoreAddress.of({address!r}), "web")
add = writer.append
seen = []
def append(texts, originals):
    add(texts, originals)
    seen.append(1)
    if len(seen) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
writer.append = append
store._BLOCK_BYTES = 1 << 16
writer._connection.execute("PRAGMA cache_size = 10")
list(store.import_files([{path!r}], writer, "web", store.ImportOptions(), ProgressLine(None, 1, lambda text: None)))
"""


def test_a_killed_import_leaves_the_store_as_it_was(sqlite_database: Database, tmp_path: Path) -> None:
    put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", ["a"]))
    path = jsonl(tmp_path / "b.jsonl", [f"{number} " + "x" * 2000 for number in range(200)])
    program = KILLED.format(root=str(ROOT), address=sqlite_database.base, path=path)
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -signal.SIGKILL
    assert sqlite_database.path.with_name("store.db-journal").stat().st_size > 0  # it was in the middle of writing
    assert texts_of(sqlite_database, "web") == ["a"]
    assert problems_of(sqlite_database) == {"web": []}
    assert put(sqlite_database, "web", path)[0].record is not None
    assert len(texts_of(sqlite_database, "web")) == 201 and problems_of(sqlite_database) == {"web": []}


def test_a_killed_import_into_mongodb_is_not_counted(
    mongo_database: Database, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    put(mongo_database, "web", jsonl(tmp_path / "a.jsonl", ["a"]))
    address = StoreAddress.of(mongo_database.base)
    killed = open_writer(address, "web")
    killed.begin()
    killed.append(["half", "of it"], None)  # and no more is heard of it
    assert texts_of(mongo_database, "web") == ["a"]
    assert "documents up to idx 2, but meta_info counts 1" in capsys.readouterr().err
    assert problems_of(mongo_database)["web"][0].startswith("2 indices beyond")
    path = jsonl(tmp_path / "b.jsonl", ["b"])
    with pytest.raises(ConfigError, match=rf"process {os.getpid()} of machine .* is importing into collection 'web'"):
        put(mongo_database, "web", path)
    put(mongo_database, "web", path, takes_over=True)
    assert texts_of(mongo_database, "web") == ["a", "b"] and problems_of(mongo_database) == {"web": []}
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    mongo_database.mongo()["meta_info"].update_one(
        {"collection_name": "web"},
        {"$set": {"importer": {"machine": store_writers.THIS_MACHINE, "process": gone.pid}}},
    )
    put(mongo_database, "web", jsonl(tmp_path / "c.jsonl", ["c"]))
    assert texts_of(mongo_database, "web") == ["a", "b", "c"]


def test_an_import_that_was_taken_over_is_not_counted(mongo_database: Database, tmp_path: Path) -> None:
    address = StoreAddress.of(mongo_database.base)
    slow = open_writer(address, "web")
    slow.begin()
    slow.append(["slow"], None)
    entries = mongo_database.mongo()["meta_info"]
    entries.update_one({"collection_name": "web"}, {"$set": {"importer": {"machine": "other", "process": 1}}})
    with pytest.raises(DataError, match=r"another import took over collection 'web' while slow\.jsonl was added"):
        slow.commit(store_writers.ImportRecord("web", "slow.jsonl", "f", "text", 0, 1))
    assert len(open_store(mongo_database.address("web"))) == 0
    assert slow.records() == []


def test_two_imports_that_begin_together(
    mongo_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = jsonl(tmp_path / "a.jsonl", ["a"])
    put(mongo_database, "web", path)
    entries = mongo_database.mongo()["meta_info"]

    def hold(process: int) -> None:
        holder = {"machine": store_writers.THIS_MACHINE, "process": process}
        entries.update_one({"collection_name": "web"}, {"$set": {"importer": holder}})

    def is_running(process: int) -> bool:
        hold(process + 1)  # the other one is quicker
        return False

    hold(1)
    monkeypatch.setattr(store_writers, "is_running", is_running)
    with pytest.raises(ConfigError, match="another process just started to import into collection 'web'"):
        put(mongo_database, "web", jsonl(tmp_path / "b.jsonl", ["b"]))
    assert texts_of(mongo_database, "web") == ["a"]


def test_driver_errors_are_reported(mongo_database: Database) -> None:
    pymongo = pytest.importorskip("pymongo")
    writer: Any = open_writer(StoreAddress.of(mongo_database.base), "web")
    writer.begin()
    writer.append(["a"], None)
    writer._next = 0
    with pytest.raises(DataError, match=r"a document could not be added: .*E11000.*run one at a time"):
        writer.append(["b"], None)
    with (
        pytest.raises(DataError, match=r"mongodb://h/d: the server rejected the request: not authorized"),
        translated_errors("mongodb://h/d"),
    ):
        raise pymongo.errors.OperationFailure("not authorized")
    with (
        pytest.raises(DataError, match=r"cannot be sent or read: BSON too large.*16 MB"),
        translated_errors("mongodb://h/d"),
    ):
        raise pymongo.errors.DocumentTooLarge("BSON too large")


def test_two_imports_at_once(sqlite_database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_writers, "BUSY_SECONDS", 0.05)
    first = open_writer(StoreAddress.of(sqlite_database.base), "web")
    first.begin()
    with pytest.raises(StorageError, match=r"store\.db is locked by a process that writes it"):
        put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", ["a"]))
    first.abort()
    put(sqlite_database, "web", str(tmp_path / "a.jsonl"))
    first.close()


def test_an_idx_that_is_there_twice_stops_the_import(sqlite_database: Database, tmp_path: Path) -> None:
    connection = sqlite3.connect(sqlite_database.path)
    connection.execute("CREATE TABLE web (_id INTEGER PRIMARY KEY, idx INTEGER, form TEXT, filt_text TEXT)")
    connection.executemany("INSERT INTO web (idx, filt_text) VALUES (?, 'x')", [(0,), (0,)])
    connection.commit()
    with pytest.raises(DataError, match=r"collection 'web' has a duplicate idx .*UNIQUE constraint failed: web\.idx"):
        put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", ["a"]))


def test_a_missing_folder_and_a_full_disk(tmp_path: Path, sqlite_database: Database) -> None:
    with pytest.raises(ConfigError, match=r"the folder .*absent does not exist"):
        open_writer(StoreAddress.of(f"sqlite:///{tmp_path}/absent/x.db"), "web")
    put(sqlite_database, "web", jsonl(tmp_path / "a.jsonl", ["a"]))
    writer: Any = open_writer(StoreAddress.of(sqlite_database.base), "web")
    writer._connection.execute("PRAGMA max_page_count = 20")
    path = jsonl(tmp_path / "b.jsonl", ["x" * 1_000_000])
    with pytest.raises(StorageError, match=r"store\.db: database or disk is full.*free space"):
        list(import_files([path], writer, "web", ImportOptions(), ProgressLine(None, 1, lambda text: None)))
    writer.close()
    assert texts_of(sqlite_database, "web") == ["a"]


def test_a_document_longer_than_sqlite_holds(sqlite_database: Database, tmp_path: Path) -> None:
    writer: Any = open_writer(StoreAddress.of(sqlite_database.base), "web")
    if hasattr(writer._connection, "setlimit"):
        writer._connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, 1000)
        writer.begin()
        with pytest.raises(DataError, match=r"after idx -1 of collection 'web' is longer than SQLite allows"):
            writer.append(["x" * 2000], None)
        writer.abort()
    writer.close()
