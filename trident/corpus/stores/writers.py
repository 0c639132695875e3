"""Adds a file's documents to a collection of a store: all of them or none, even if the process is killed.

SQLite keeps one transaction open for the whole file; new pages are not journaled, so that costs neither memory nor
time. MongoDB has no transactions on a single server: documents are added above the count in `meta_info`, which readers
ignore, and updating the count completes the import. The next import removes documents of a killed one above the count.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, astuple, fields
from pathlib import Path
from typing import Protocol
from urllib.parse import quote

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.backend import (
    FILTERED_COLUMN,
    IMPORT_COLLECTION,
    META_COLLECTION,
    ORIGINAL_COLUMN,
    RESERVED_COLLECTIONS,
    CollectionFacts,
    ImportRecord,
)
from megatron.data.stores.mongodb import MongoCollections, translated_errors
from megatron.data.stores.record_store import PAIR_COLUMNS
from megatron.data.stores.sqlite import BUSY_SECONDS, quoted_name, sqlite_error
from megatron.errors import ConfigError, DataError
from megatron.files.replacing import THIS_MACHINE, is_running

_SCHEMA = (
    f"CREATE TABLE IF NOT EXISTS {META_COLLECTION} (collection_name TEXT PRIMARY KEY, num_docs INTEGER NOT NULL)",
    f"CREATE TABLE IF NOT EXISTS {IMPORT_COLLECTION} (collection_name TEXT NOT NULL, source TEXT NOT NULL, "
    "fingerprint TEXT NOT NULL, key TEXT NOT NULL, first_idx INTEGER NOT NULL, num_docs INTEGER NOT NULL)",
)
_IMPORTER = "importer"


class StoreWriter(Protocol):
    """Adds to one collection of a store, one file at a time."""

    def records(self) -> list[ImportRecord]:
        """Returns the completed imports into the collection."""
        ...

    def begin(self) -> int:
        """Locks out other imports, removes documents of a killed one, and returns the next idx."""
        ...

    def append(self, texts: Sequence[str], others: Sequence[str] | None) -> None:
        """Appends documents.

        Args:
            others: the unfiltered texts, if kept; for pairs, the answers.
        """
        ...

    def commit(self, record: ImportRecord) -> None:
        """Makes the documents added since `begin` part of the collection."""
        ...

    def abort(self) -> None:
        """Removes the documents added since `begin`."""
        ...

    def close(self) -> None: ...


def open_writer(
    address: StoreAddress, collection: str, takes_over: bool = False, holds_pairs: bool = False
) -> StoreWriter:
    """Returns a writer for a collection; collection and SQLite file are created if necessary.

    Args:
        takes_over: continue although an import of another machine seems to be running.
        holds_pairs: the collection's documents are questions with answers.

    Raises:
        ConfigError: invalid name of a collection.
        DataError: a table of this name is not a collection of documents.
        StorageError: the database cannot be reached or written.
    """
    if (
        not collection
        or collection in RESERVED_COLLECTIONS
        or collection.startswith(("sqlite_", "system."))
        or "$" in collection
        or "\0" in collection
    ):
        raise ConfigError(
            f"--collection {collection!r} is not a valid name: {', '.join(RESERVED_COLLECTIONS)}, sqlite_* and "
            "system.* are reserved, and $ is not allowed. Use another name."
        )
    address.check_password()
    columns = PAIR_COLUMNS if holds_pairs else (FILTERED_COLUMN, ORIGINAL_COLUMN)
    if address.kind == "sqlite":
        return _SqliteWriter(address.target, collection, columns)
    return _MongoWriter(MongoCollections(address.target, address.database), collection, columns, takes_over)


class _SqliteWriter:
    def __init__(self, path: str, collection: str, columns: tuple[str, str]) -> None:
        self._path = path
        self._collection = collection
        self._columns = columns
        self._next = 0
        folder = Path(path).absolute().parent
        if not folder.is_dir():
            raise ConfigError(f"{path}: the folder {folder} does not exist. Create it, or correct the path.")
        with self._translated_errors():
            address = f"file:{quote(os.path.abspath(path))}?mode=rwc"
            self._connection = sqlite3.connect(address, uri=True, timeout=BUSY_SECONDS, isolation_level=None)
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()

    def records(self) -> list[ImportRecord]:
        with self._translated_errors():
            if not self._has_table(IMPORT_COLLECTION):
                return []
            names = ", ".join(field.name for field in fields(ImportRecord))
            rows = self._connection.execute(
                f"SELECT {names} FROM {IMPORT_COLLECTION} WHERE collection_name = ? ORDER BY rowid", (self._collection,)
            )
            return [ImportRecord(*row) for row in rows]

    def begin(self) -> int:
        table = quoted_name(self._collection)
        with self._translated_errors():
            self._connection.execute("BEGIN IMMEDIATE")
            try:
                for statement in _SCHEMA:
                    self._connection.execute(statement)
                if not self._has_table(self._collection):
                    self._connection.execute(
                        f"CREATE TABLE {table} (_id INTEGER PRIMARY KEY, idx INTEGER NOT NULL, "
                        f"{self._columns[1]} TEXT, {self._columns[0]} TEXT NOT NULL)"
                    )
                columns = {row[1] for row in self._connection.execute(f"PRAGMA table_info({table})")}
                _check_columns(self._path, self._collection, columns, self._columns)
                index = quoted_name(f"{self._collection}_idx")
                self._connection.execute(f"CREATE UNIQUE INDEX IF NOT EXISTS {index} ON {table} (idx)")
                self._next = self._first_free(table)
            except BaseException:
                self.abort()
                raise
        return self._next

    def append(self, texts: Sequence[str], others: Sequence[str] | None) -> None:
        seconds: Sequence[str | None] = others if others is not None else [None] * len(texts)
        rows = zip(range(self._next, self._next + len(texts)), texts, seconds, strict=True)
        with self._translated_errors():
            self._connection.executemany(
                f"INSERT INTO {quoted_name(self._collection)} (idx, {', '.join(self._columns)}) VALUES (?, ?, ?)",
                rows,
            )
        self._next += len(texts)

    def commit(self, record: ImportRecord) -> None:
        with self._translated_errors():
            marks = ", ".join("?" for _ in fields(ImportRecord))
            self._connection.execute(f"INSERT INTO {IMPORT_COLLECTION} VALUES ({marks})", astuple(record))
            self._connection.execute(
                f"INSERT INTO {META_COLLECTION} VALUES (?, ?) "
                "ON CONFLICT (collection_name) DO UPDATE SET num_docs = excluded.num_docs",
                (self._collection, self._next),
            )
            self._connection.execute("COMMIT")

    def abort(self) -> None:
        if self._connection.in_transaction:
            self._connection.execute("ROLLBACK")

    def close(self) -> None:
        self._connection.close()

    def _first_free(self, table: str) -> int:
        row = self._connection.execute(
            f"SELECT num_docs FROM {META_COLLECTION} WHERE collection_name = ?", (self._collection,)
        ).fetchone()
        last = self._connection.execute(f"SELECT max(idx) FROM {table}").fetchone()[0]
        size = 0 if last is None else last + 1
        return _agreed(self._path, self._collection, size if row is None else row[0], size)

    def _has_table(self, name: str) -> bool:
        tables = self._connection.execute("SELECT 1 FROM sqlite_master WHERE name = ? AND type = 'table'", (name,))
        return tables.fetchone() is not None

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.IntegrityError as failure:
            raise DataError(
                f"{self._path}: collection {self._collection!r} has a duplicate idx ({failure}), so nothing can be "
                "added. tools/corpus/corpus_store.py stat lists the duplicates; import into a new collection."
            ) from failure
        except (sqlite3.DataError, OverflowError) as failure:
            raise DataError(
                f"{self._path}: a document after idx {self._next - 1} of collection {self._collection!r} is longer "
                f"than SQLite allows ({failure}). Split or remove it."
            ) from failure
        except sqlite3.Error as failure:
            raise sqlite_error(self._path, failure) from failure


class _MongoWriter:
    """Locks the collection by a field of its entry in `meta_info` with machine and process."""

    def __init__(self, backend: MongoCollections, collection: str, columns: tuple[str, str], takes_over: bool) -> None:
        self._backend = backend
        self._collection = collection
        self._columns = columns
        self._takes_over = takes_over
        self._mine = {"machine": THIS_MACHINE, "process": os.getpid()}
        self._holds = False
        self._first = self._next = 0

    def records(self) -> list[ImportRecord]:
        return [record for record in self._backend.imports() if record.collection_name == self._collection]

    def begin(self) -> int:
        database, name = self._backend.database, self._collection
        facts = self._backend.facts(name)
        _check_facts(self._backend.shown, name, facts, self._columns)
        size = 0 if facts.last_idx is None else facts.last_idx + 1
        with translated_errors(self._backend.shown):
            database[name].create_index("idx", unique=True)
            database[META_COLLECTION].create_index("collection_name", unique=True)
            database[META_COLLECTION].update_one(
                {"collection_name": name}, {"$setOnInsert": {"num_docs": size}}, upsert=True
            )
            self._lock()
            try:
                counted = int(database[META_COLLECTION].find_one({"collection_name": name})["num_docs"])
                database[name].delete_many({"idx": {"$gte": counted}})
                gone = {"collection_name": name, "first_idx": {"$gte": counted}}
                database[IMPORT_COLLECTION].delete_many(gone)
                self._first = self._next = _agreed(self._backend.shown, name, counted, min(size, counted))
            except BaseException:
                self._unlock()
                raise
        return self._first

    def append(self, texts: Sequence[str], others: Sequence[str] | None) -> None:
        first, second = self._columns
        seconds: Sequence[str | None] = others if others is not None else [None] * len(texts)
        documents = [
            {"idx": idx, first: text} if other is None else {"idx": idx, second: other, first: text}
            for idx, (text, other) in enumerate(zip(texts, seconds, strict=True), self._next)
        ]
        if documents:
            with translated_errors(self._backend.shown):
                self._backend.database[self._collection].insert_many(documents)
        self._next += len(texts)

    def commit(self, record: ImportRecord) -> None:
        database = self._backend.database
        with translated_errors(self._backend.shown):
            database[IMPORT_COLLECTION].insert_one(asdict(record))
            done = database[META_COLLECTION].update_one(
                {"collection_name": self._collection, _IMPORTER: self._mine, "num_docs": self._first},
                {"$set": {"num_docs": self._next}, "$unset": {_IMPORTER: ""}},
            )
        self._holds = False
        if done.matched_count != 1:
            raise DataError(
                f"{self._backend.shown}: another import took over collection {self._collection!r} while "
                f"{record.source} was added, so it is not counted. Import it again when no other import runs."
            )

    def abort(self) -> None:
        if self._holds:
            with translated_errors(self._backend.shown):
                self._backend.database[self._collection].delete_many({"idx": {"$gte": self._first}})
                self._unlock()

    def close(self) -> None:
        self._backend.close()

    def _lock(self) -> None:
        """Locks the collection for this process, unless another live process holds the lock."""
        entries = self._backend.database[META_COLLECTION]
        holder = entries.find_one({"collection_name": self._collection}).get(_IMPORTER)
        if holder is not None and not self._takes_over:
            is_gone = holder.get("machine") == THIS_MACHINE and not is_running(int(holder.get("process", 0)))
            if not is_gone:
                raise ConfigError(
                    f"{self._backend.shown}: process {holder.get('process')} of machine {holder.get('machine')} is "
                    f"importing into collection {self._collection!r}. Wait until it is done; if it was killed, use "
                    "--take-over."
                )
        done = entries.update_one(
            {"collection_name": self._collection, _IMPORTER: holder}, {"$set": {_IMPORTER: self._mine}}
        )
        if done.matched_count != 1:
            raise ConfigError(
                f"{self._backend.shown}: another process just started to import into collection {self._collection!r}. "
                "Wait until it is done."
            )
        self._holds = True

    def _unlock(self) -> None:
        self._backend.database[META_COLLECTION].update_one(
            {"collection_name": self._collection, _IMPORTER: self._mine}, {"$unset": {_IMPORTER: ""}}
        )
        self._holds = False


def _check_facts(shown: str, name: str, facts: CollectionFacts, required: tuple[str, str]) -> None:
    if facts.columns:
        _check_columns(shown, name, {*facts.columns, ORIGINAL_COLUMN}, required)


def _check_columns(shown: str, name: str, columns: set[str], required: tuple[str, str]) -> None:
    missing = [column for column in ("idx", *sorted(required, reverse=True)) if column not in columns]
    if missing:
        raise DataError(
            f"{shown}: {name!r} is not a collection of a document store: it lacks {', '.join(map(repr, missing))}. Use "
            "another --collection."
        )


def _agreed(shown: str, name: str, counted: int, size: int) -> int:
    """Returns the next idx, if `meta_info` and the documents agree."""
    if counted != size:
        raise DataError(
            f"{shown}: meta_info counts {counted} documents in collection {name!r}, but its last idx is {size - 1}. "
            "Correct num_docs, or import into a new collection."
        )
    return counted
