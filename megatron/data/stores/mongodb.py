"""A document store in a MongoDB database, with the optional package pymongo.

A client is made when a process first reads: it may be shared by threads, but not across a fork.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from megatron.data.stores.address import without_password
from megatron.data.stores.backend import (
    IMPORT_COLLECTION,
    META_COLLECTION,
    RESERVED_COLLECTIONS,
    CollectionFacts,
    ImportRecord,
)
from megatron.errors import ConfigError, DataError, StorageError

_SERVER_WAIT_MILLISECONDS = 10_000
_BATCH_DOCUMENTS = 256


class MongoCollections:
    """The collections of a MongoDB database.

    Args:
        connection: the driver's connection string.
    """

    def __init__(self, connection: str, database: str) -> None:
        self.shown = f"{without_password(connection).partition('?')[0].rstrip('/')}"
        if not self.shown.endswith(f"/{database}"):
            self.shown += f"/{database}"
        self._connection = connection
        self._database_name = database
        self._clients: dict[int, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"shown": self.shown, "connection": self._connection, "database": self._database_name}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.shown, self._connection, self._database_name = state["shown"], state["connection"], state["database"]
        self._clients = {}

    @property
    def database(self) -> Any:
        """The driver's database object of this process."""
        process = os.getpid()
        if process not in self._clients:
            self._clients[process] = connect(self._connection, self.shown)
        return self._clients[process][self._database_name]

    def names(self) -> tuple[str, ...]:
        """Collections that `meta_info` lists, then those it does not list, by name."""
        with explained(self.shown):
            there = self.database.list_collection_names()
            listed = [entry.get("collection_name") for entry in self.database[META_COLLECTION].find().sort("_id", 1)]
        names = dict.fromkeys(name for name in listed if name in there)
        others = sorted(name for name in there if name not in RESERVED_COLLECTIONS and not name.startswith("system."))
        return tuple(dict.fromkeys([*names, *others]))

    def facts(self, name: str) -> CollectionFacts:
        """What can be said of a collection without reading its documents."""
        with explained(self.shown):
            collection = self.database[name]
            first = collection.find_one({}, sort=[("idx", 1)])
            last = collection.find_one({}, {"idx": 1}, sort=[("idx", -1)])
            meta = self.database[META_COLLECTION].find_one({"collection_name": name})
            keys = [entry["key"] for entry in collection.index_information().values()]
        for entry in (first, last):
            if entry is not None and not isinstance(entry.get("idx"), int):
                raise DataError(
                    f"{self.shown}: a document of collection {name!r} has the idx {entry.get('idx')!r}; it must be a "
                    "whole number. Import the collection with tools/corpus_store.py."
                )
        return CollectionFacts(
            columns=() if first is None else tuple(first),
            counted=None if meta is None or meta.get("num_docs") is None else int(meta["num_docs"]),
            first_idx=None if first is None else first["idx"],
            last_idx=None if last is None else last["idx"],
            is_indexed=any(key and key[0][0] == "idx" for key in keys),
        )

    def imports(self) -> list[ImportRecord]:
        """Imports that were completed, in their order: the documents of others are not counted by `meta_info`."""
        names = [field.name for field in fields(ImportRecord)]
        with explained(self.shown):
            counted = {
                entry.get("collection_name"): entry.get("num_docs") or 0
                for entry in self.database[META_COLLECTION].find()
            }
            found = self.database[IMPORT_COLLECTION].find().sort("_id", 1)
            records = [ImportRecord(*(entry[name] for name in names)) for entry in found]
        return [
            record for record in records if record.first_idx + record.num_docs <= counted.get(record.collection_name, 0)
        ]

    def texts(self, name: str, column: str, first: int, stop: int) -> list[tuple[int, Any]]:
        """The documents with first <= idx < stop as (idx, value), in order of idx."""
        with explained(self.shown):
            found = self.database[name].find({"idx": {"$gte": first, "$lt": stop}}, {"_id": 0, "idx": 1, column: 1})
            return [(entry["idx"], entry.get(column)) for entry in found.sort("idx", 1)]

    def scan(
        self, name: str, columns: Sequence[str], skipped: int, limit: int
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Documents in order of idx, each as its idx and its values.

        Args:
            skipped: documents to leave out at the beginning.
            limit: most documents to give; -1 for all.
        """
        with explained(self.shown):
            meta = self.database[META_COLLECTION].find_one({"collection_name": name})
            wanted = {} if meta is None or meta.get("num_docs") is None else {"idx": {"$lt": int(meta["num_docs"])}}
            fields = {"idx": 1, **dict.fromkeys(columns, 1)}
            found = self.database[name].find(wanted, fields).sort("idx", 1)
            found = found.skip(skipped).limit(max(limit, 0)).batch_size(_BATCH_DOCUMENTS)
            for number, entry in enumerate(found if limit else ()):
                yield entry.get("idx", skipped + number), tuple(entry.get(column) for column in columns)

    def indices(self, name: str) -> Iterator[int | None]:
        """The idx of every document, sorted, duplicates included; None for a document without one."""
        with explained(self.shown):
            for entry in self.database[name].find({}, {"_id": 0, "idx": 1}).sort("idx", 1):
                yield entry.get("idx")

    def count(self, name: str, below: int | None = None) -> int:
        """Documents of a collection, counted by the server; with `below`, those whose idx is less."""
        with explained(self.shown):
            return int(self.database[name].count_documents({} if below is None else {"idx": {"$lt": below}}))

    def close(self) -> None:
        """Closes the client of this process; the next read makes another."""
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()


def connect(connection: str, shown: str) -> Any:
    """A client of the driver.

    Raises:
        ConfigError: pymongo is missing, or the connection string is wrong.
    """
    pymongo = _pymongo(shown)
    options = (
        {} if "serverSelectionTimeoutMS" in connection else {"serverSelectionTimeoutMS": _SERVER_WAIT_MILLISECONDS}
    )
    try:
        return pymongo.MongoClient(connection, **options)
    except (pymongo.errors.ConfigurationError, ValueError) as failure:
        raise ConfigError(f"{shown}: {failure}. Write mongodb://host:27017/database?collection=name.") from failure


@contextmanager
def explained(shown: str) -> Iterator[None]:
    """Turns what the driver raises into an error with the address.

    Raises:
        DataError: the server refused, two documents have the same idx, or one is too long.
        StorageError: the server cannot be reached.
    """
    pymongo = _pymongo(shown)
    import bson.errors

    try:
        yield
    except (pymongo.errors.DuplicateKeyError, pymongo.errors.BulkWriteError) as failure:
        raise DataError(
            f"{shown}: a document could not be added: {_first_reason(failure)}. Another import may be writing the same "
            "collection; run one at a time."
        ) from failure
    except pymongo.errors.ConnectionFailure as failure:
        raise StorageError(
            f"{shown} cannot be reached: {failure}. Check that the server runs and that the address is right."
        ) from failure
    except pymongo.errors.PyMongoError as failure:
        raise DataError(f"{shown}: the server refused: {failure}.") from failure
    except bson.errors.BSONError as failure:
        raise DataError(
            f"{shown}: a document cannot be sent or read: {failure}. MongoDB holds 16 MB a document, in UTF-8; divide "
            "it, or keep it in a SQLite file."
        ) from failure


def _first_reason(failure: Any) -> str:
    errors = (failure.details or {}).get("writeErrors") or [{}]
    return str(errors[0].get("errmsg") or failure)


def _pymongo(shown: str) -> Any:
    try:
        import pymongo
    except ImportError as failure:
        raise ConfigError(
            f"{shown} needs the pymongo package: pip install pymongo, or keep the documents in a SQLite file "
            "(sqlite:///file.db)."
        ) from failure
    return pymongo
