"""SQLite files as stores: never modified, with clear errors."""

import sqlite3
from pathlib import Path

import pytest

from megatron.data.stores import sqlite as sqlite_store
from megatron.data.stores.document_store import open_store
from megatron.errors import DataError, StorageError
from tests.data.databases import WEB, Database, new_database, numbered, write_web_and_news


def test_plain_tables_are_numbered_by_their_rows(tmp_path: Path) -> None:
    path = tmp_path / "plain.db"
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE docs (title TEXT, text TEXT)")
    connection.executemany("INSERT INTO docs VALUES ('t', ?)", [(text,) for text in WEB[:10]])
    connection.execute("DELETE FROM docs WHERE rowid <= 2")
    connection.commit()
    store = open_store(f"sqlite:///{path}?table=docs")
    assert list(store) == WEB[2:10] and open_store(f"sqlite:///{path}?table=docs&column=title")[0] == "t"
    connection.execute("DELETE FROM docs WHERE rowid = 5")
    connection.execute("CREATE TABLE keyed (name TEXT PRIMARY KEY, text TEXT) WITHOUT ROWID")
    connection.commit()
    with pytest.raises(DataError, match=r"1 of the 8 documents of collection 'docs' are missing"):
        list(open_store(f"sqlite:///{path}?table=docs"))
    with pytest.raises(DataError, match=r"'keyed' has no column idx and no rowid"):
        open_store(f"sqlite:///{path}?table=keyed")


def test_a_sqlite_file_is_neither_created_nor_modified(tmp_path: Path, sqlite_database: Database) -> None:
    with pytest.raises(DataError, match=r"absent\.db: no such SQLite file\. Check the path"):
        open_store(f"sqlite:///{tmp_path}/absent.db")
    write_web_and_news(sqlite_database)
    with pytest.raises(DataError, match=r"Use four slashes for /.*store\.db"):
        open_store(f"sqlite://{sqlite_database.path}")
    assert [path.name for path in tmp_path.iterdir()] == ["store.db"]
    before = sqlite_database.path.read_bytes()
    store = open_store(sqlite_database.base)
    assert store[0] == WEB[0]
    with pytest.raises(sqlite3.OperationalError, match="readonly"):
        store._backend._connection.execute("DELETE FROM web")  # type: ignore[attr-defined]
    assert sqlite_database.path.read_bytes() == before


def test_damaged_and_foreign_files(tmp_path: Path, sqlite_database: Database) -> None:
    path = tmp_path / "text.db"
    path.write_bytes(b"no database at all" * 100)
    with pytest.raises(DataError, match=r"text\.db cannot be read as a SQLite store: file is not a database"):
        open_store(f"sqlite:///{path}")
    sqlite_database.write({"web": numbered(["x" * 5000] * 200)})
    with sqlite_database.path.open("r+b") as file:
        file.seek(100_000)
        file.write(b"\xff" * 300_000)
    with pytest.raises(
        DataError, match=r"store\.db cannot be read as a SQLite store: database disk image is malformed"
    ):
        list(open_store(sqlite_database.base))


def test_text_that_is_not_utf8_is_named(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "bad.db")
    connection.execute("CREATE TABLE docs (text TEXT)")
    connection.execute("INSERT INTO docs VALUES (CAST(x'61ff62' AS TEXT))")
    connection.commit()
    with pytest.raises(DataError, match=r"docs: idx 0: text is not UTF-8 \(byte 0xff at 1\)"):
        open_store(f"sqlite:///{tmp_path}/bad.db")[0]


def test_a_locked_file_is_reported(sqlite_database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    write_web_and_news(sqlite_database)
    writer = sqlite3.connect(sqlite_database.path, isolation_level=None)
    writer.execute("BEGIN EXCLUSIVE")
    monkeypatch.setattr(sqlite_store, "BUSY_SECONDS", 0.05)
    with pytest.raises(StorageError, match=r"store\.db is locked by a process that writes it \(waited 0\.05 s\)"):
        open_store(sqlite_database.base)
    writer.execute("ROLLBACK")
    assert open_store(sqlite_database.base)[0] == WEB[0]


def test_non_numeric_idx(sqlite_database: Database, tmp_path: Path) -> None:
    sqlite_database.write({"web": [("one", "a")]})  # type: ignore[list-item]
    with pytest.raises(DataError, match=r"idx of table 'web' holds b'one'; it must hold integers"):
        open_store(sqlite_database.base)
    with new_database("mongomock", tmp_path) as database:
        database.write({"web": [("one", "a")]})  # type: ignore[list-item]
        with pytest.raises(DataError, match=r"'web' has the idx 'one'; it must be an integer"):
            open_store(database.base)
