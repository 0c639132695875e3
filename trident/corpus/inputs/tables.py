"""Inputs that are not files: tables of databases and datasets of the `datasets` library.

    sqlite:///corpus.db?table=web      mongodb://host/corpus?collection=web      db.json
    hf://name, hf://name:split, hf://name:configuration:split, hf://folder

What reads them is imported when one is named. Rows of a database are passed on as lines of JSON, so that the reader of
lines reads them too; rows of a dataset in Arrow's form, like rows of Parquet files. They come in order of idx or of
their place, with memory that does not grow.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol

from megatron.data.formats.store_names import is_store_address
from trident.corpus.inputs.block import InputBlock

_HUB = "hf://"
# What `save_to_disk` of the datasets library leaves in the folder of one split, and in the folder of several.
_SAVED = ("state.json", "dataset_dict.json")


class InputTable(Protocol):
    """Rows with texts, in order."""

    @property
    def rows(self) -> int:
        """How many there are."""
        ...

    @property
    def file(self) -> str | None:
        """The file that holds the rows, if one does."""
        ...

    def size_bytes(self, start: int, stop: int | None) -> int | None:
        """What the rows [start, stop) take on disk, in bytes; None if unknown."""
        ...

    def check(self, keys: Sequence[str]) -> None: ...

    def blocks(self, keys: Sequence[str], start: int, stop: int | None, block_bytes: int) -> Iterator[InputBlock]:
        """The texts of the rows [start, stop) under all keys, about `block_bytes` per block."""
        ...


def is_table(path: str) -> bool:
    """Whether an input is a database or a dataset, not a file."""
    return path.startswith(_HUB) or is_store_address(path)


def is_saved_data(path: str) -> bool:
    """Whether a folder holds what `save_to_disk` of the datasets library wrote."""
    return any(os.path.isfile(os.path.join(path, name)) for name in _SAVED)


def tables_of(value: str) -> list[str]:
    """The tables that a value of `--input` names, each as an input of its own.

    Raises:
        ConfigError: it is not an address.
        DataError: a table is missing.
        StorageError: the database cannot be reached, or is locked.
    """
    if value.startswith(_HUB):
        return [value]
    names: list[str] = _stores().table_names(value)
    return names


def open_table(path: str) -> InputTable:
    """Opens one of the inputs that `tables_of` gives.

    Raises:
        ConfigError: it is not an address, names several tables, or a package is missing.
        DataError: there is no such table.
        StorageError: the database cannot be reached, or is locked.
    """
    module = import_module("trident.corpus.inputs.hub_rows") if path.startswith(_HUB) else _stores()
    table: InputTable = module.open_table(path)
    return table


def _stores() -> Any:
    return import_module("trident.corpus.stores.store_table")
