"""Stores whose documents have a prompt and an answer: dsGPT2's chat collections, `{q, a, idx}`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.backend import FILTERED_COLUMN, PLAIN_COLUMN, StoreBackend
from megatron.data.stores.document_store import checked_size, open_backend, select_collections
from megatron.errors import DataError

PAIR_COLUMNS = ("q", "a")


class PairStore:
    """The pairs of a store's collections, one collection after another.

    Args:
        address: of the store; `column=question,answer` selects other columns than `q` and `a`.

    Raises:
        ConfigError: a driver or the password is missing.
        DataError: a collection or a column is missing, or documents cannot be numbered.
        StorageError: the database cannot be reached.
    """

    def __init__(self, address: StoreAddress) -> None:
        self._backend = open_backend(address)
        self.shown = self._backend.shown
        self.columns = _named_columns(address) or PAIR_COLUMNS
        self._sizes: dict[str, int] = {}
        for name in select_collections(self._backend, address.collections):
            facts = self._backend.facts(name)
            self._sizes[name] = checked_size(self.shown, name, facts)
            missing = [column for column in self.columns if column not in facts.columns]
            if missing and self._sizes[name]:
                raise DataError(
                    f"{self.shown}: collection {name!r} has no column {missing[0]!r}; it has "
                    f"{', '.join(map(repr, facts.columns[:8]))}. Name the columns of the prompt and the answer, as in "
                    "column=question,answer."
                )

    def __len__(self) -> int:
        return sum(self._sizes.values())

    def records(self) -> Iterator[dict[str, Any]]:
        """Yields the pairs in order, each under the keys `q` and `a`.

        Raises:
            DataError, StorageError: a document is missing, or the database cannot be read.
        """
        for name, size in self._sizes.items():
            count = 0
            for idx, values in self._backend.scan(name, self.columns, 0, size):
                if idx != count:
                    problem = "is missing" if idx > count else "exists twice"
                    raise DataError(f"{self.shown}: idx {min(idx, count)} of collection {name!r} {problem}.")
                yield {key: _text(value) for key, value in zip(PAIR_COLUMNS, values, strict=True)}
                count += 1
            if count < size:
                raise DataError(f"{self.shown}: idx {count} of collection {name!r} is missing.")

    def fingerprint(self) -> str:
        """Returns the SHA-256 over all pairs, independent of the database."""
        digest = hashlib.sha256()
        for record in self.records():
            digest.update(json.dumps([str(record[key]) for key in PAIR_COLUMNS]).encode())
        return digest.hexdigest()


def holds_pairs(address: StoreAddress) -> bool:
    """Returns True if a store holds pairs: its address names two columns, or it has `q` and `a` but no text column.

    Raises:
        ConfigError, DataError, StorageError: as `PairStore`.
    """
    if address.column is not None:
        return _named_columns(address) is not None
    backend: StoreBackend = open_backend(address)
    columns = [backend.facts(name).columns for name in select_collections(backend, address.collections)]
    backend.close()
    return any(set(PAIR_COLUMNS) <= set(names) for names in columns) and not any(
        FILTERED_COLUMN in names or PLAIN_COLUMN in names for names in columns
    )


def _named_columns(address: StoreAddress) -> tuple[str, ...] | None:
    """Returns the two columns named by an address; None if it names fewer."""
    names = tuple((address.column or "").split(","))
    return names if len(names) == 2 and all(names) else None


def _text(value: Any) -> Any:
    """Decodes a text; other values are returned unchanged and rejected by the reader."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value
