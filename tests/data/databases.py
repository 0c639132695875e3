"""Document stores for tests, written by hand in both databases: with holes, duplicates and without `meta_info`."""

import os
import sqlite3
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

Row = tuple[int, Any]

WEB = [f"web {number} ğüşİ 🙂\n" for number in range(40)]
NEWS = ["", "news 1", "한국어"]


def numbered(texts: Sequence[Any], first: int = 0) -> list[Row]:
    """Texts with their idx."""
    return list(enumerate(texts, first))


@dataclass(frozen=True)
class Database:
    """An empty database and how to write into it past the product.

    Args:
        base: its address, to which options are added.
    """

    kind: str
    base: str
    path: Path

    def address(self, *collections: str, column: str | None = None) -> str:
        """The address of collections of the database."""
        options = [f"collection={name}" for name in collections] + ([f"column={column}"] if column else [])
        separator = "&" if "?" in self.base else "?"
        return self.base + (separator + "&".join(options) if options else "")

    def write(
        self,
        collections: Mapping[str, Sequence[Row]],
        counted: Mapping[str, int] | None = None,
        column: str = "filt_text",
        index: str | None = "unique",
    ) -> None:
        """Writes collections of (idx, text).

        Args:
            counted: the counts of `meta_info`; None omits it.
            index: on idx: unique, plain or None.
        """
        rows = {name: [(idx, (text,)) for idx, text in texts] for name, texts in collections.items()}
        self.write_pairs(rows, counted, (column,), index)

    def write_pairs(
        self,
        collections: Mapping[str, Sequence[tuple[int, tuple[Any, ...]]]],
        counted: Mapping[str, int] | None = None,
        columns: tuple[str, ...] = ("q", "a"),
        index: str | None = "unique",
    ) -> None:
        """Writes collections of (idx, (prompt, answer)), as dsGPT2's chat collections are."""
        if self.kind != "sqlite":
            self._write_mongo(collections, counted or {}, columns, index)
            return
        connection = sqlite3.connect(self.path)
        for name, rows in collections.items():
            kind = "form TEXT, " if len(columns) == 1 else ""
            names = ", ".join(columns)
            connection.execute(f'CREATE TABLE "{name}" (_id INTEGER PRIMARY KEY, idx INTEGER, {kind}{names})')
            if index is not None:
                unique = "UNIQUE" if index == "unique" else ""
                connection.execute(f'CREATE {unique} INDEX "{name}_idx" ON "{name}" (idx)')
            values = [(idx, *row) for idx, row in rows]
            marks = ", ?" * len(columns)
            connection.executemany(f'INSERT INTO "{name}" (idx, {names}) VALUES (?{marks})', values)
        if counted is not None:
            connection.execute("CREATE TABLE meta_info (collection_name TEXT PRIMARY KEY, num_docs INTEGER)")
            connection.executemany("INSERT INTO meta_info VALUES (?, ?)", counted.items())
        connection.commit()
        connection.close()

    def _write_mongo(
        self, collections: Mapping[str, Any], counted: Mapping[str, int], columns: Sequence[str], index: str | None
    ) -> None:
        database = self.mongo()
        for name, rows in collections.items():
            if index is not None:
                database[name].create_index("idx", unique=index == "unique")
            if rows:
                database[name].insert_many([{"idx": idx, **dict(zip(columns, row, strict=True))} for idx, row in rows])
            elif index is None:
                database.create_collection(name)
        for name, count in counted.items():
            database["meta_info"].insert_one({"collection_name": name, "num_docs": count})

    def mongo(self) -> Any:
        """The driver's database object."""
        import pymongo

        server, _, rest = self.base.rpartition("/")
        return pymongo.MongoClient(server)[rest.partition("?")[0]]


def write_web_and_news(database: Database, **options: Any) -> None:
    """Writes the collections `web` and `news`; the options are those of `Database.write`."""
    database.write({"web": numbered(WEB), "news": numbered(NEWS)}, **options)


@contextmanager
def new_database(kind: str, folder: Path) -> Iterator[Database]:
    """An empty database: a SQLite file, an in-process MongoDB, or a database of its own on a real server."""
    if kind == "sqlite":
        path = folder / "store.db"
        yield Database(kind, f"sqlite:///{path}", path)
        return
    name = f"trident_test_{os.getpid()}_{abs(hash(str(folder))) % 10**8}"
    if kind == "mongomock":
        mongomock = pytest.importorskip("mongomock", reason="the mongomock package is not installed")
        with mongomock.patch(servers=(("localhost", 27017),)):
            yield Database(kind, f"mongodb://localhost:27017/{name}", folder)
        return
    pymongo = pytest.importorskip("pymongo", reason="the pymongo package is not installed")
    server = os.environ.get("MEGATRON_TEST_MONGO_URI")
    if not server:
        pytest.skip("MEGATRON_TEST_MONGO_URI is not set: no real MongoDB server to test with")
    base, _, options = server.partition("?")
    try:
        yield Database(kind, f"{base.rstrip('/')}/{name}" + (f"?{options}" if options else ""), folder)
    finally:
        pymongo.MongoClient(server).drop_database(name)


KINDS = ("sqlite", "mongomock", "mongodb")
