"""What a document store needs from its database.

Source: the schema is dsGPT2's: documents `{_id, idx, form, filt_text}` and a collection `meta_info` with
`{collection_name, num_docs}`. `idx` counts from 0 in every collection, without holes.
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
    """What a database says of a collection without reading its documents.

    Args:
        columns: of the table, or fields of the first document.
        counted: documents according to `meta_info`; None where it says nothing.
        first_idx, last_idx: the least and the greatest idx; None of an empty collection.
        is_indexed: whether a document is found by its idx without reading the others.
        is_numbered: whether the documents have numbers at all.
    """

    columns: tuple[str, ...]
    counted: int | None
    first_idx: int | None
    last_idx: int | None
    is_indexed: bool
    is_numbered: bool = True


@dataclass(frozen=True)
class ImportRecord:
    """One file that was imported into a collection: what makes a second import of it known.

    Args:
        source: its path as it was given.
        fingerprint: hash of its bytes.
        key: under which its texts were found.
        first_idx, num_docs: the documents it gave.
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
        """Collections there are: those `meta_info` lists, in its order, then the others."""
        ...

    def facts(self, name: str) -> CollectionFacts:
        """What can be said of a collection without reading it."""
        ...

    def texts(self, name: str, column: str, first: int, stop: int) -> list[tuple[int, Any]]:
        """The documents with first <= idx < stop as (idx, value), in order of idx."""
        ...

    def scan(
        self, name: str, columns: Sequence[str], skipped: int, limit: int
    ) -> Iterator[tuple[int, tuple[Any, ...]]]:
        """At most `limit` documents in order, all for -1, after `skipped` ones, each as its idx and its values."""
        ...

    def indices(self, name: str) -> Iterator[int | None]:
        """The idx of every document, sorted, duplicates included; None for a document without one."""
        ...

    def count(self, name: str, below: int | None = None) -> int:
        """Documents of a collection, counted one by one; with `below`, those whose idx is less."""
        ...

    def close(self) -> None:
        """Closes what is open; the next read opens it again."""
        ...
