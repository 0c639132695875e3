"""Stores whose documents have a prompt and an answer: dsGPT2's chat collections, `{q, a, idx}`."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from typing import Any

from megatron.data.stores.address import StoreAddress
from megatron.data.stores.backend import FILTERED_COLUMN, PLAIN_COLUMN, StoreBackend
from megatron.data.stores.document_store import checked_size, chosen_collections, open_backend
from megatron.errors import DataError

PAIR_COLUMNS = ("q", "a")


class PairStore:
    """The pairs of a store's collections, one collection after the other.

    Args:
        address: of the store; `column=question,answer` names other columns than `q` and `a`.

    Raises:
        ConfigError: a driver is missing, or the password.
        DataError: a collection or a column is missing, or documents cannot be numbered.
        StorageError: the database cannot be reached.
    """

    def __init__(self, address: StoreAddress) -> None:
        self._backend = open_backend(address)
        self.shown = self._backend.shown
        self.columns = _named_columns(address) or PAIR_COLUMNS
        self._sizes: dict[str, int] = {}
        for name in chosen_collections(self._backend, address.collections):
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
        """The pairs in order, each under the keys `q` and `a`.

        Raises:
            DataError, StorageError: a document is missing, or the database cannot be read.
        """
        for name, size in self._sizes.items():
            count = 0
            for idx, values in self._backend.scan(name, self.columns, 0, size):
                if idx != count:
                    what = "is missing (a hole)" if idx > count else "is there twice"
                    raise DataError(f"{self.shown}: idx {min(idx, count)} of collection {name!r} {what}.")
                yield {key: _text(value) for key, value in zip(PAIR_COLUMNS, values, strict=True)}
                count += 1
            if count < size:
                raise DataError(f"{self.shown}: idx {count} of collection {name!r} is missing (a hole).")

    def fingerprint(self) -> str:
        """SHA-256 over all pairs, the same for any database that holds them."""
        digest = hashlib.sha256()
        for record in self.records():
            digest.update(json.dumps([str(record[key]) for key in PAIR_COLUMNS]).encode())
        return digest.hexdigest()


def holds_pairs(address: StoreAddress) -> bool:
    """Whether a store is to be read as pairs: its address names two columns, or its documents have no text but `q`
    and `a`.

    Raises:
        ConfigError, DataError, StorageError: as `PairStore`.
    """
    if address.column is not None:
        return _named_columns(address) is not None
    backend: StoreBackend = open_backend(address)
    columns = [backend.facts(name).columns for name in chosen_collections(backend, address.collections)]
    backend.close()
    return any(set(PAIR_COLUMNS) <= set(one) for one in columns) and not any(
        FILTERED_COLUMN in one or PLAIN_COLUMN in one for one in columns
    )


def _named_columns(address: StoreAddress) -> tuple[str, ...] | None:
    """The two columns that an address names; None if it names one or none."""
    names = tuple((address.column or "").split(","))
    return names if len(names) == 2 and all(names) else None


def _text(value: Any) -> Any:
    """A text of a database; what is not one is left as it is, for the reader to refuse."""
    if not isinstance(value, bytes):
        return value
    try:
        return value.decode("utf-8")
    except UnicodeDecodeError:
        return value
