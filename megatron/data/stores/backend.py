"""The database interface of a document store.

Source: the schema is dsGPT2's: documents `{_id, idx, form, filt_text}` and a collection `meta_info` with
`{collection_name, num_docs}`. `idx` counts from 0 in every collection, without gaps.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

META_COLLECTION = "meta_info"
IMPORT_COLLECTION = "import_info"
RESERVED_COLLECTIONS = (META_COLLECTION, IMPORT_COLLECTION)
FILTERED_COLUMN = "filt_text"
ORIGINAL_COLUMN = "form"
PLAIN_COLUMN = "text"


@dataclass(frozen=True)
class CollectionFacts:
    """Properties of a collection that are available without reading its documents.

    Args:
        columns: of the table, or fields of the first document.
        counted: documents according to `meta_info`; None without an entry.
        first_idx, last_idx: the smallest and the largest idx; None for an empty collection.
        is_indexed: an index finds a document by its idx.
        is_numbered: the documents are numbered at all.
    """

    columns: tuple[str, ...]
    counted: int | None
    first_idx: int | None
    last_idx: int | None
    is_indexed: bool
    is_numbered: bool = True


@dataclass(frozen=True)
class ImportRecord:
    """A file imported into a collection; identifies a second import of the same file.

    Args:
        source: its path as given.
        fingerprint: hash of its bytes.
        key: the key of its texts.
        first_idx, num_docs: the range of its documents.
    """

    collection_name: str
    source: str
    fingerprint: str
    key: str
    first_idx: int
    num_docs: int


class StoreBackend(Protocol):
    """A database that holds collections of documents; safe to use from several threads and after a fork."""

    shown: str

    def names(self) -> tuple[str, ...]:
        """Returns the collections: in the order of `meta_info`, then unlisted ones."""
        ...

    def facts(self, name: str) -> CollectionFacts:
        """Returns the properties of a collection without reading it."""
        ...

    def texts(self, name: str, column: str, first: int, stop: int) -> list[tuple[int, Any]]:
        """Returns the documents with first <= idx < stop as (idx, value), in order of idx."""
        ...

    def scan(
        self, name: str, columns: Sequence[str], skipped: int, limit: int
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """Yields at most `limit` documents (-1: all) after `skipped` ones, in order, each as idx and values."""
        ...

    def indices(self, name: str) -> Iterator[int | None]:
        """Yields the idx of every document, sorted, with duplicates; None for a document without one."""
        ...

    def count(self, name: str, below: int | None = None) -> int:
        """Counts the documents of a collection one by one, optionally only those with an idx less than `below`."""
        ...

    def close(self) -> None:
        """Closes the connection; the next read opens it again."""
        ...
