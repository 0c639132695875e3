"""A document store in a MongoDB database, with the optional package pymongo.

A client is created on a process's first read: threads may share it, forked processes may not.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from megatron import log
from megatron.data.stores.backend import (
    IMPORT_COLLECTION,
    META_COLLECTION,
    RESERVED_COLLECTIONS,
    CollectionFacts,
    ImportRecord,
    StoreBackend,
)
from megatron.errors import ConfigError, DataError, MegatronError, StorageError
from megatron.secret_text import SecretText, masked, reveal, without_secret

_SERVER_WAIT_MILLISECONDS = 10_000
_BATCH_DOCUMENTS = 256


class MongoCollections(StoreBackend):
    """The collections of a MongoDB database.

    Args:
        connection: the driver's connection string, guarded if it holds a secret.
    """

    def __init__(self, connection: str, database: str) -> None:
        shown = masked(connection).partition("?")[0].rstrip("/")
        if not shown.endswith(f"/{database}"):
            shown += f"/{database}"
        self.shown: str = SecretText(shown, reveal(connection))  # to find the secret in messages of the driver
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
        """The driver's database object in this process."""
        process = os.getpid()
        if process not in self._clients:
            self._clients[process] = connect(self._connection, self.shown)
        return self._clients[process][self._database_name]

    def names(self) -> tuple[str, ...]:
        with translated_errors(self.shown):
            available = self.database.list_collection_names()
            listed = [entry.get("collection_name") for entry in self.database[META_COLLECTION].find().sort("_id", 1)]
        names = [name for name in listed if name in available]
        others = sorted(
            name for name in available if name not in RESERVED_COLLECTIONS and not name.startswith("system.")
        )
        return tuple(dict.fromkeys([*names, *others]))

    def facts(self, name: str) -> CollectionFacts:
        with translated_errors(self.shown):
            collection = self.database[name]
            first = collection.find_one({}, sort=[("idx", 1)])
            last = collection.find_one({}, {"idx": 1}, sort=[("idx", -1)])
            meta = self.database[META_COLLECTION].find_one({"collection_name": name})
            keys = [entry["key"] for entry in collection.index_information().values()]
        for entry in (first, last):
            if entry is not None and not isinstance(entry.get("idx"), int):
                raise DataError(
                    f"{self.shown}: a document of collection {name!r} has the idx {entry.get('idx')!r}; it must be an "
                    "integer. Import the collection with tools/corpus/corpus_store.py."
                )
        return CollectionFacts(
            columns=() if first is None else tuple(first),
            counted=None if meta is None or meta.get("num_docs") is None else int(meta["num_docs"]),
            first_idx=None if first is None else first["idx"],
            last_idx=None if last is None else last["idx"],
            is_indexed=any(key and key[0][0] == "idx" for key in keys),
        )

    def imports(self) -> list[ImportRecord]:
        """Returns the completed imports in order; `meta_info` does not count the documents of incomplete ones."""
        names = [field.name for field in fields(ImportRecord)]
        with translated_errors(self.shown):
            counted = {
                entry.get("collection_name"): entry.get("num_docs") or 0
                for entry in self.database[META_COLLECTION].find()
            }
            entries = self.database[IMPORT_COLLECTION].find().sort("_id", 1)
            records = [ImportRecord(*(entry[name] for name in names)) for entry in entries]
        return [
            record for record in records if record.first_idx + record.num_docs <= counted.get(record.collection_name, 0)
        ]

    def texts(self, name: str, column: str, first: int, stop: int) -> list[tuple[int, Any]]:
        with translated_errors(self.shown):
            entries = self.database[name].find({"idx": {"$gte": first, "$lt": stop}}, {"_id": 0, "idx": 1, column: 1})
            return [(entry["idx"], entry.get(column)) for entry in entries.sort("idx", 1)]

    def scan(
        self, name: str, columns: Sequence[str], skipped: int, limit: int
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        with translated_errors(self.shown):
            meta = self.database[META_COLLECTION].find_one({"collection_name": name})
            query = {} if meta is None or meta.get("num_docs") is None else {"idx": {"$lt": int(meta["num_docs"])}}
            fields = {"idx": 1, **dict.fromkeys(columns, 1)}
            entries = self.database[name].find(query, fields).sort("idx", 1)
            entries = entries.skip(skipped).limit(max(limit, 0)).batch_size(_BATCH_DOCUMENTS)
            for number, entry in enumerate(entries if limit else ()):
                yield entry.get("idx", skipped + number), tuple(entry.get(column) for column in columns)

    def indices(self, name: str) -> Iterator[int | None]:
        with translated_errors(self.shown):
            for entry in self.database[name].find({}, {"_id": 0, "idx": 1}).sort("idx", 1):
                yield entry.get("idx")

    def count(self, name: str, below: int | None = None) -> int:
        with translated_errors(self.shown):
            return int(self.database[name].count_documents({} if below is None else {"idx": {"$lt": below}}))

    def close(self) -> None:
        client = self._clients.pop(os.getpid(), None)
        if client is not None:
            client.close()


def connect(connection: str, shown: str) -> Any:
    """Creates a client of the driver.

    Raises:
        ConfigError: pymongo is missing, or the connection string is wrong.
    """
    pymongo = _pymongo(shown)
    options = (
        {} if "serverSelectionTimeoutMS" in connection else {"serverSelectionTimeoutMS": _SERVER_WAIT_MILLISECONDS}
    )
    try:
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            client = pymongo.MongoClient(reveal(connection), **options)
    except Exception as failure:
        reason = without_secret(str(failure), connection)
        raise ConfigError(f"{shown}: {reason}. Use mongodb://host:27017/database?collection=name.") from None
    for warning in (one for one in warned if not issubclass(one.category, ResourceWarning)):
        log.warning(f"{shown}: {without_secret(str(warning.message), connection)}")
    return client


@contextmanager
def translated_errors(shown: str) -> Iterator[None]:
    """Converts the driver's exceptions to errors with the address, without its secrets.

    Args:
        shown: the address. The driver's exception is not chained, since a traceback would reveal the secret.

    Raises:
        DataError: the server rejected the request, two documents have the same idx, or one is too long.
        StorageError: the server cannot be reached.
    """
    _pymongo(shown)
    try:
        yield
    except MegatronError:
        raise
    except Exception as failure:
        raise _translated(failure, shown) from None


def _translated(failure: Exception, shown: str) -> MegatronError:
    import bson.errors

    pymongo, reason = _pymongo(shown), without_secret(str(failure), shown)
    if isinstance(failure, (pymongo.errors.DuplicateKeyError, pymongo.errors.BulkWriteError)):
        return DataError(
            f"{shown}: a document could not be added: {without_secret(_first_reason(failure), shown)}. Another import "
            "may be writing the same collection; run one at a time."
        )
    if isinstance(failure, pymongo.errors.ConnectionFailure):
        return StorageError(
            f"{shown} cannot be reached: {reason}. Check that the server is running and that the address is correct."
        )
    if isinstance(failure, bson.errors.BSONError):
        return DataError(
            f"{shown}: a document cannot be sent or read: {reason}. MongoDB documents are limited to 16 MB of UTF-8; "
            "split it, or use a SQLite file."
        )
    if isinstance(failure, pymongo.errors.PyMongoError):
        return DataError(f"{shown}: the server rejected the request: {reason}.")
    return DataError(f"{shown}: the driver failed ({type(failure).__name__}): {reason}.")


def _first_reason(failure: Any) -> str:
    errors = (failure.details or {}).get("writeErrors") or [{}]
    return str(errors[0].get("errmsg") or failure)


def _pymongo(shown: str) -> Any:
    try:
        import pymongo
    except ImportError as failure:
        raise ConfigError(
            f"{shown} requires the pymongo package: pip install pymongo, or use a SQLite file (sqlite:///file.db)."
        ) from failure
    return pymongo
