"""Documents in a database, read by index: the collections share one index space, and documents are fetched on demand.

`open_store("sqlite:///corpus.db?table=web,news")` returns a `DocumentStore`; see `address.py` for other addresses.
Only the sizes of the collections are held in memory.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron import log
from megatron.data.stores.address import StoreAddress
from megatron.data.stores.backend import (
    FILTERED_COLUMN,
    PLAIN_COLUMN,
    CollectionFacts,
    StoreBackend,
)
from megatron.data.stores.mongodb import MongoCollections
from megatron.data.stores.sqlite import SqliteCollections
from megatron.errors import DataError


@dataclass(frozen=True)
class Collection:
    """A collection and its range in the index space of its store.

    Args:
        first, last: its documents are first <= index < last.
        column: the text column.
    """

    name: str
    first: int
    last: int
    column: str

    def __len__(self) -> int:
        return self.last - self.first


class DocumentStore:
    """The collections of a database as one sequence of texts.

    Safe to use from several threads, and after a fork or a pickle.

    Args:
        names: collections in order; empty for all.
        column: the text column; None for `filt_text` or, if missing, `text`.

    Raises:
        DataError: a collection or a column is missing, cannot be fetched by index, or contradicts `meta_info`.
        StorageError: the database cannot be reached, or is locked.
    """

    def __init__(self, backend: StoreBackend, names: Sequence[str] = (), column: str | None = None) -> None:
        self.shown = backend.shown
        self._backend = backend
        collections = []
        first = 0
        for name in select_collections(backend, names):
            facts = backend.facts(name)
            size = checked_size(backend.shown, name, facts)
            _check_no_gaps(backend, name, size)
            texts = text_column(backend.shown, name, facts.columns, column) if size or facts.columns else ""
            collections.append(Collection(name, first, first + size, texts))
            first += size
        self.collections = tuple(collections)
        self._lasts = [collection.last for collection in collections]

    def __len__(self) -> int:
        return self._lasts[-1] if self._lasts else 0

    def __getitem__(self, document: int) -> str:
        return self.fetch(document)

    def __iter__(self) -> Iterator[str]:
        return map(self.fetch, range(len(self)))

    def fetch(self, document: int) -> str:
        """Returns the text of one document.

        Raises:
            DataError: the document is missing, duplicated, or not a text.
            StorageError: the database cannot be reached, or is locked.
        """
        collection = self.collection_of(document)
        idx = document - collection.first
        rows = self._backend.texts(collection.name, collection.column, idx, idx + 1)
        return self._texts(collection, range(idx, idx + 1), rows)[0]

    def fetch_many(self, documents: range) -> list[str]:
        """Returns the texts of consecutive documents, in one query per collection.

        Raises:
            DataError, StorageError: as for `fetch`.
        """
        if not documents:
            return []
        self.collection_of(documents[0])
        self.collection_of(documents[-1])
        texts: list[str] = []
        for collection in self.collections:
            first, stop = max(documents.start, collection.first), min(documents.stop, collection.last)
            if first < stop:
                indices = range(first - collection.first, stop - collection.first)
                rows = self._backend.texts(collection.name, collection.column, indices.start, indices.stop)
                texts += self._texts(collection, indices, rows)
        return texts

    def collection_of(self, document: int) -> Collection:
        """Returns the collection that holds a document.

        Raises:
            DataError: the document is out of range.
        """
        if not 0 <= document < len(self):
            available = f"it holds 0 to {len(self) - 1}" if len(self) else "it is empty"
            raise DataError(f"{self.shown}: no document {document}; {available} ({len(self)} documents).")
        return self.collections[bisect.bisect_right(self._lasts, document)]

    def _texts(self, collection: Collection, indices: range, rows: Sequence[tuple[int, Any]]) -> list[str]:
        if len(rows) != len(indices) or any(row[0] != idx for row, idx in zip(rows, indices, strict=True)):
            self._refuse_indices(collection, indices, rows)
        return [
            value if type(value) is str else _as_text(value, f"{self.shown}: {collection.name}", collection.column, idx)
            for idx, value in rows
        ]

    def _refuse_indices(self, collection: Collection, indices: range, rows: Sequence[tuple[int, Any]]) -> None:
        counts = dict.fromkeys(indices, 0)
        for idx, _ in rows:
            counts[idx] = counts.get(idx, 0) + 1
        idx = next(idx for idx, count in counts.items() if count != 1)
        problem = "is missing" if not counts[idx] else f"exists {counts[idx]} times"
        raise DataError(
            f"{self.shown}: idx {idx} of collection {collection.name!r} (document {collection.first + idx} of the "
            f"store) {problem}. Import the collection again; tools/corpus/corpus_store.py stat lists all such indices."
        )


def open_store(address: str | StoreAddress) -> DocumentStore:
    """Opens the store at an address or in a configuration file; only the sizes are read.

    Raises:
        ConfigError: not an address, or pymongo is missing.
        DataError, StorageError: see `DocumentStore`.
    """
    address = StoreAddress.of(address) if isinstance(address, str) else address
    return DocumentStore(open_backend(address), address.collections, address.column)


def open_backend(address: StoreAddress) -> StoreBackend:
    """Opens the database behind a store.

    Raises:
        ConfigError: the address lacks its password, or a driver is missing.
    """
    address.check_password()
    if address.kind == "sqlite":
        return SqliteCollections(address.target)
    return MongoCollections(address.target, address.database)


def select_collections(backend: StoreBackend, names: Sequence[str]) -> tuple[str, ...]:
    """Returns the named collections, or all.

    Raises:
        DataError: a collection is missing, or the database has none.
    """
    available = backend.names()
    listed = ", ".join(map(repr, available[:8])) or "none"
    missing = [name for name in names if name not in available]
    if missing:
        raise DataError(f"{backend.shown}: no collection {missing[0]!r}; it has {listed}.")
    if not available:
        raise DataError(f"{backend.shown}: it has no collections. Import documents with tools/corpus/corpus_store.py.")
    return tuple(names) or available


def text_column(shown: str, name: str, columns: Sequence[str], requested: str | None) -> str:
    """Returns the text column of a collection.

    Raises:
        DataError: the column is missing.
    """
    choices = (FILTERED_COLUMN, PLAIN_COLUMN) if requested is None else (requested,)
    for column in choices:
        if column in columns:
            return column
    raise DataError(
        f"{shown}: collection {name!r} has no column {' or '.join(map(repr, choices))}; it has "
        f"{', '.join(map(repr, columns[:8])) or 'none'}. Choose one with column= in the address."
    )


def _check_no_gaps(backend: StoreBackend, name: str, size: int) -> None:
    # A gap must be found before training, not during it.
    missing = size - backend.count(name, size)
    if missing > 0:
        raise DataError(
            f"{backend.shown}: {missing} of the {size} documents of collection {name!r} are missing (gaps in idx). "
            "tools/corpus/corpus_store.py stat lists the indices. Import them, or import everything into a new "
            "collection."
        )


def checked_size(shown: str, name: str, facts: CollectionFacts) -> int:
    """Returns the number of documents of a collection that can be fetched by index."""
    if not facts.is_numbered or not facts.is_indexed:
        missing = "no index on idx" if facts.is_numbered else "no column idx and no rowid"
        raise DataError(
            f"{shown}: collection {name!r} has {missing}, so finding one document would read all of them. Import it "
            f"with tools/corpus/corpus_store.py, or create the index (CREATE UNIQUE INDEX {name}_idx ON {name}(idx))."
        )
    size = 0 if facts.last_idx is None else facts.last_idx + 1
    if facts.first_idx:
        raise DataError(
            f"{shown}: idx of collection {name!r} begins with {facts.first_idx}, so document 0 is missing. Number the "
            "documents from 0, or import them again."
        )
    if facts.counted is None:
        return size
    if size < facts.counted:
        raise DataError(
            f"{shown}: meta_info counts {facts.counted} documents in collection {name!r}, but its last idx is "
            f"{size - 1}: documents are missing. Import them again, or correct num_docs."
        )
    if size > facts.counted:
        log.warning(
            f"{shown}: collection {name!r} holds documents up to idx {size - 1}, but meta_info counts "
            f"{facts.counted}; the others are skipped (an import is running or was killed: the next one removes them)."
        )
    return facts.counted


def _as_text(value: Any, collection: str, column: str, idx: int) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as failure:
            raise DataError(
                f"{collection}: idx {idx}: {column} is not UTF-8 (byte 0x{value[failure.start]:02x} at "
                f"{failure.start}). Fix the document."
            ) from failure
    problem = "is null or missing" if value is None else f"holds a value of type {type(value).__name__}, not text"
    raise DataError(f"{collection}: idx {idx}: {column} {problem}. Fix the document, or select another column.")
