"""A document store in one SQLite file: one table per collection, read without changing the file.

Every thread of every process opens its own connection on its first read, so threads and forked processes may share a
store. Nothing is mapped and SQLite's cache is small: memory does not grow with the store.
"""

from __future__ import annotations

import os
import sqlite3
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from megatron.data.stores.backend import (
    META_COLLECTION,
    RESERVED_COLLECTIONS,
    CollectionFacts,
    StoreBackend,
)
from megatron.errors import DataError, MegatronError, StorageError
from megatron.files.plain import check_plain

BUSY_SECONDS = 10.0
_FETCH_ROWS = 256


@dataclass(frozen=True)
class _Table:
    """The numbering of a table's rows.

    Args:
        order: SQL expression that numbers and sorts the rows: `idx`, else `rowid`; None for a table with neither.
        base: value of `order` in the first row.
    """

    order: str | None
    base: int


class SqliteCollections(StoreBackend):
    """The tables of a SQLite file as collections of documents.

    Args:
        path: the file; it is never created.

    Raises:
        DataError: the file does not exist, or is not a SQLite file.
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self.shown = path
        self._threads = threading.local()
        self._tables: dict[str, _Table] = {}
        with self._translated_errors():
            self._connection.execute("SELECT count(*) FROM sqlite_master").fetchone()

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "shown": self.shown, "tables": self._tables}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.shown = state["path"], state["shown"]
        self._tables = state["tables"]
        self._threads = threading.local()

    def names(self) -> tuple[str, ...]:
        with self._translated_errors():
            tables = self._tables_of_file()
            listed = []
            if META_COLLECTION in tables:
                rows = self._connection.execute(f"SELECT collection_name FROM {META_COLLECTION} ORDER BY rowid")
                listed = [name for (name,) in _decoded(rows) if name in tables]
        others = [name for name in tables if name not in RESERVED_COLLECTIONS and name not in listed]
        return (*listed, *others)

    def facts(self, name: str) -> CollectionFacts:
        with self._translated_errors():
            columns = [row[1].decode() for row in self._connection.execute(f"PRAGMA table_info({quoted_name(name)})")]
            table = self._table(name, columns)
            least, greatest = self._extremes(name, table)
            return CollectionFacts(
                columns=tuple(columns),
                counted=self._counted(name),
                first_idx=None if least is None else least - table.base,
                last_idx=None if greatest is None else greatest - table.base,
                is_indexed=table.order == "rowid" or (table.order == "idx" and self._has_index(name)),
                is_numbered=table.order is not None,
            )

    def texts(self, name: str, column: str, first: int, stop: int) -> list[tuple[int, Any]]:
        table = self._tables[name]
        with self._translated_errors():
            rows = self._connection.execute(
                f"SELECT {table.order}, {quoted_name(column)} FROM {quoted_name(name)} "
                f"WHERE {table.order} >= ? AND {table.order} < ? ORDER BY {table.order}",
                (first + table.base, stop + table.base),
            ).fetchall()
        return [(idx - table.base, value) for idx, value in rows] if table.base else rows

    def scan(
        self, name: str, columns: Sequence[str], skipped: int, limit: int
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yields documents as `StoreBackend.scan`; a table without idx yields row numbers, and TEXT comes as bytes."""
        facts = self.facts(name)
        table = self._tables[name]
        order = "rowid" if table.order == "rowid" else "idx, rowid" if self._has_rowid(name) else "idx"
        if table.order is None:
            order = ", ".join(quoted_name(column) for column in self._primary_key(name))
        number = table.order or "NULL"
        bound = f"WHERE idx < {facts.counted}" if table.order == "idx" and facts.counted is not None else ""
        values = ", ".join(quoted_name(column) for column in columns)
        with self._translated_errors():
            cursor = self._connection.execute(
                f"SELECT {number}, {values} FROM {quoted_name(name)} {bound} ORDER BY {order} LIMIT ? OFFSET ?",
                (limit, skipped),
            )
            for row in cursor:  # one by one: a row may be large
                yield (skipped if row[0] is None else row[0]), row[1:]
                skipped += 1

    def indices(self, name: str) -> Iterator[int | None]:
        table = self._tables[name]
        with self._translated_errors():
            cursor = self._connection.execute(f"SELECT {table.order} FROM {quoted_name(name)} ORDER BY {table.order}")
            while rows := cursor.fetchmany(_FETCH_ROWS):
                yield from (None if idx is None else idx - table.base for (idx,) in rows)

    def count(self, name: str, below: int | None = None) -> int:
        bound = "" if below is None or self._tables[name].order != "idx" else f"WHERE idx < {below}"
        with self._translated_errors():
            return int(self._connection.execute(f"SELECT count(*) FROM {quoted_name(name)} {bound}").fetchone()[0])

    def close(self) -> None:
        connection = self._threads.__dict__.pop(str(os.getpid()), None)
        if connection is not None:
            connection.close()

    @property
    def _connection(self) -> sqlite3.Connection:
        # A connection inherited by a fork is kept but never touched.
        connections, process = self._threads.__dict__, str(os.getpid())
        if process not in connections:
            connections[process] = self._connect()
        return connections[process]  # type: ignore[no-any-return]

    def _connect(self) -> sqlite3.Connection:
        try:
            check_plain(self.path)
        except FileNotFoundError:
            absolute = f" Use four slashes for /{self.path}." if os.path.isfile(f"/{self.path}") else ""
            raise DataError(f"{self.path}: no such SQLite file.{absolute or ' Check the path.'}") from None
        except OSError as failure:
            raise DataError(f"{self.path} cannot be read: {failure.strerror}. Give a SQLite file.") from failure
        # "rw" creates no file and lets SQLite roll back changes of a killed writer; query_only rejects every change.
        address = f"file:{quote(os.path.abspath(self.path))}?mode=rw"
        connection = sqlite3.connect(  # used by one thread at a time, but a scan may move between threads
            address, uri=True, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        connection.text_factory = bytes
        connection.execute("PRAGMA query_only = ON")
        return connection

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as failure:
            raise sqlite_error(self.path, failure) from failure

    def _tables_of_file(self) -> list[str]:
        rows = self._connection.execute(
            "SELECT name FROM sqlite_master WHERE type IN ('table', 'view') AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\' "
            "ORDER BY rowid"
        )
        return [name for (name,) in _decoded(rows)]

    def _table(self, name: str, columns: Sequence[str]) -> _Table:
        if name not in self._tables:
            if "idx" in columns:
                table = _Table("idx", 0)
            elif self._has_rowid(name):
                table = _Table("rowid", self._extremes(name, _Table("rowid", 0))[0] or 0)
            else:
                table = _Table(None, 0)
            self._tables[name] = table
        return self._tables[name]

    def _extremes(self, name: str, table: _Table) -> tuple[int | None, int | None]:
        if table.order is None:
            return None, None
        extremes = []
        for function in ("min", "max"):  # one query each: only then does SQLite read just the ends of the index
            row = self._connection.execute(f"SELECT {function}({table.order}) FROM {quoted_name(name)}").fetchone()
            if row[0] is not None and not isinstance(row[0], int):
                raise DataError(f"{self.path}: idx of table {name!r} holds {row[0]!r}; it must hold integers.")
            extremes.append(row[0])
        return extremes[0], extremes[1]

    def _counted(self, name: str) -> int | None:
        if META_COLLECTION not in self._tables_of_file():
            return None
        row = self._connection.execute(
            f"SELECT num_docs FROM {META_COLLECTION} WHERE collection_name = ?", (name,)
        ).fetchone()
        return None if row is None or row[0] is None else int(row[0])

    def _has_rowid(self, name: str) -> bool:
        kind = self._connection.execute("SELECT type FROM sqlite_master WHERE name = ?", (name,)).fetchone()[0]
        if kind != b"table":
            return False
        try:
            self._connection.execute(f"SELECT rowid FROM {quoted_name(name)} LIMIT 0")
        except sqlite3.OperationalError:
            return False
        return True

    def _primary_key(self, name: str) -> list[str]:
        rows = self._connection.execute(f"PRAGMA table_info({quoted_name(name)})").fetchall()
        columns = [row[1].decode() for row in sorted(rows, key=lambda row: row[5]) if row[5]]
        if not columns:
            raise DataError(
                f"{self.path}: the view {name!r} has no column idx, so its rows have no order. Add one, or use a table."
            )
        return columns

    def _has_index(self, name: str) -> bool:
        quoted = quoted_name(name)
        columns = self._connection.execute(f"PRAGMA table_info({quoted})").fetchall()
        if any(row[1] == b"idx" and row[5] and row[2].upper() == b"INTEGER" for row in columns):
            return True
        for row in self._connection.execute(f"PRAGMA index_list({quoted})").fetchall():
            parts = self._connection.execute(f"PRAGMA index_info({quoted_name(row[1].decode())})").fetchall()
            if parts and parts[0][2] == b"idx" and not row[4]:
                return True
        return False


def quoted_name(name: str) -> str:
    """Quotes the name of a table or column for SQL."""
    return '"' + name.replace('"', '""') + '"'


def sqlite_error(path: str, failure: sqlite3.Error) -> MegatronError:
    """Converts an exception of SQLite to an error with the file and advice."""
    reason = str(failure)
    if "locked" in reason or "busy" in reason:
        return StorageError(
            f"{path} is locked by a process that writes it (waited {BUSY_SECONDS:g} s). Start again when it is done."
        )
    if "readonly" in reason or "unable to open" in reason or "disk I/O" in reason or "full" in reason:
        return StorageError(
            f"{path}: {reason}. Check the permissions of the file and its folder (SQLite may write a journal next to "
            "it) and the free space."
        )
    return DataError(f"{path} cannot be read as a SQLite store: {reason}. Restore the file, or import it again.")


def _decoded(rows: Iterator[Any]) -> list[tuple[Any, ...]]:
    return [tuple(value.decode() if isinstance(value, bytes) else value for value in row) for row in rows]
