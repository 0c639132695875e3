"""Documents in a database, read by number: collections one after the other in one index space, fetched when asked for.

`open_store("sqlite:///corpus.db?table=web,news")` gives a `DocumentStore`; see `address.py` for other addresses.
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
    """A collection and its place in the index space of its store.

    Args:
        first, last: its documents are first <= number < last.
        column: that holds the texts.
    """

    name: str
    first: int
    last: int
    column: str

    def __len__(self) -> int:
        return self.last - self.first


class DocumentStore:
    """The collections of a database as one sequence of texts; `store[len(first collection)]` is the second's first.

    Safe to use from several threads, and after a fork or a pickle.

    Args:
        names: collections in order; empty for all there are.
        column: that holds the texts; None for `filt_text` or, where there is none, `text`.

    Raises:
        DataError: a collection or a column is missing, cannot be fetched by number, or contradicts `meta_info`.
        StorageError: the database cannot be reached, or is locked.
    """

    def __init__(self, backend: StoreBackend, names: Sequence[str] = (), column: str | None = None) -> None:
        self.shown = backend.shown
        self._backend = backend
        collections = []
        first = 0
        for name in chosen_collections(backend, names):
            facts = backend.facts(name)
            size = checked_size(backend.shown, name, facts)
            _check_no_holes(backend, name, size)
            chosen = text_column(backend.shown, name, facts.columns, column) if size or facts.columns else ""
            collections.append(Collection(name, first, first + size, chosen))
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
        """The text of one document.

        Raises:
            DataError: there is no such document, there are two, or it holds no text; the text names its number.
            StorageError: the database cannot be reached, or is locked.
        """
        collection = self.collection_of(document)
        idx = document - collection.first
        rows = self._backend.texts(collection.name, collection.column, idx, idx + 1)
        return self._texts(collection, range(idx, idx + 1), rows)[0]

    def fetch_many(self, documents: range) -> list[str]:
        """The texts of consecutive documents, in one query per collection.

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
                wanted = range(first - collection.first, stop - collection.first)
                rows = self._backend.texts(collection.name, collection.column, wanted.start, wanted.stop)
                texts += self._texts(collection, wanted, rows)
        return texts

    def collection_of(self, document: int) -> Collection:
        """The collection that holds a document.

        Raises:
            DataError: no collection does.
        """
        if not 0 <= document < len(self):
            held = f"it holds 0 to {len(self) - 1}" if len(self) else "it is empty"
            raise DataError(f"{self.shown}: there is no document {document}; {held} ({len(self)} documents).")
        return self.collections[bisect.bisect_right(self._lasts, document)]

    def _texts(self, collection: Collection, wanted: range, rows: Sequence[tuple[int, Any]]) -> list[str]:
        if len(rows) != len(wanted) or any(row[0] != idx for row, idx in zip(rows, wanted, strict=True)):
            self._refuse_numbers(collection, wanted, rows)
        return [
            value if type(value) is str else _as_text(value, f"{self.shown}: {collection.name}", collection.column, idx)
            for idx, value in rows
        ]

    def _refuse_numbers(self, collection: Collection, wanted: range, rows: Sequence[tuple[int, Any]]) -> None:
        counts = dict.fromkeys(wanted, 0)
        for idx, _ in rows:
            counts[idx] = counts.get(idx, 0) + 1
        idx = next(idx for idx, count in counts.items() if count != 1)
        what = "is missing (a hole)" if not counts[idx] else f"is there {counts[idx]} times (a duplicate)"
        raise DataError(
            f"{self.shown}: idx {idx} of collection {collection.name!r} (document {collection.first + idx} of the "
            f"store) {what}. Import the collection again; tools/corpus/corpus_store.py stat lists all such numbers."
        )


def open_store(address: str | StoreAddress) -> DocumentStore:
    """Opens the store that an address or a configuration file names; only the sizes are read.

    Raises:
        ConfigError: it is not an address, or pymongo is missing.
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
        return SqliteCollections(address.place)
    return MongoCollections(address.place, address.database)


def chosen_collections(backend: StoreBackend, names: Sequence[str]) -> tuple[str, ...]:
    """The collections that are named, or all there are.

    Raises:
        DataError: one is missing, or none is there.
    """
    there = backend.names()
    shown = ", ".join(map(repr, there[:8])) or "none"
    missing = [name for name in names if name not in there]
    if missing:
        raise DataError(f"{backend.shown}: there is no collection {missing[0]!r}; it has {shown}.")
    if not there:
        raise DataError(
            f"{backend.shown}: there is no collection in it. Import documents first: tools/corpus/corpus_store.py."
        )
    return tuple(names) or there


def text_column(shown: str, name: str, columns: Sequence[str], wanted: str | None) -> str:
    """The column of a collection that holds its texts.

    Raises:
        DataError: it is not there.
    """
    choices = (FILTERED_COLUMN, PLAIN_COLUMN) if wanted is None else (wanted,)
    for column in choices:
        if column in columns:
            return column
    raise DataError(
        f"{shown}: collection {name!r} has no column {' or '.join(map(repr, choices))}; it has "
        f"{', '.join(map(repr, columns[:8])) or 'none'}. Choose one with column= in the address."
    )


def _check_no_holes(backend: StoreBackend, name: str, size: int) -> None:
    """Counts the documents of a collection: a hole should be found before training, not during it."""
    missing = size - backend.count(name, size)
    if missing > 0:
        raise DataError(
            f"{backend.shown}: {missing} of the {size} documents of collection {name!r} are missing (holes in "
            "idx). tools/corpus/corpus_store.py stat lists the numbers. Import them, or all of it into a new "
            "collection."
        )


def checked_size(shown: str, name: str, facts: CollectionFacts) -> int:
    """Documents of a collection that can be fetched by number."""
    if not facts.is_numbered or not facts.is_indexed:
        what = "no index on idx" if facts.is_numbered else "no column idx and no rowid"
        raise DataError(
            f"{shown}: collection {name!r} has {what}, so finding one document would read all of them. Import it with "
            f"tools/corpus/corpus_store.py, or make the index (SQL: CREATE UNIQUE INDEX {name}_idx ON {name}(idx))."
        )
    size = 0 if facts.last_idx is None else facts.last_idx + 1
    if facts.first_idx:
        raise DataError(
            f"{shown}: idx of collection {name!r} begins with {facts.first_idx}, so document 0 is missing (a hole). "
            "Number the documents from 0, or import them again."
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
            f"{facts.counted}; those above are left out (an import that is running or was killed: the next one "
            "removes them)."
        )
    return facts.counted


def _as_text(value: Any, place: str, column: str, idx: int) -> str:
    if isinstance(value, bytes):
        try:
            return value.decode("utf-8")
        except UnicodeDecodeError as failure:
            raise DataError(
                f"{place}: idx {idx}: {column} is not UTF-8: byte 0x{value[failure.start]:02x} at {failure.start}. "
                "Fix the document."
            ) from failure
    kind = "is null or missing" if value is None else f"holds a {type(value).__name__}, not a text"
    raise DataError(f"{place}: idx {idx}: {column} {kind}. Fix the document, or choose another column.")
