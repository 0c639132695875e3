"""Inputs that are not files: tables of databases and datasets of the `datasets` library.

    sqlite:///corpus.db?table=web      mongodb://host/corpus?collection=web      db.json
    hf://name, hf://name:split, hf://name:configuration:split, hf://folder

Their readers are imported on demand. Rows of a database become JSON lines for the reader of lines; rows of a dataset
stay in Arrow's format, like rows of Parquet files. They come in order of idx or position, in constant memory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Any, Protocol

from megatron.data.formats.store_names import is_store_address
from trident.corpus.inputs.block import InputBlock

_HUB = "hf://"
# Files of `save_to_disk` of the datasets library in the folder of one split, and in the folder of several.
_SAVED = ("state.json", "dataset_dict.json")


class InputTable(Protocol):
    """Rows with texts, in order."""

    @property
    def rows(self) -> int:
        """The number of rows."""
        ...

    @property
    def file(self) -> str | None:
        """The file that holds the rows, if any."""
        ...

    def size_bytes(self, start: int, stop: int | None) -> int | None:
        """Returns the size of the rows [start, stop) on disk in bytes; None if unknown."""
        ...

    def check(self, keys: Sequence[str]) -> None: ...

    def blocks(self, keys: Sequence[str], start: int, stop: int | None, block_bytes: int) -> Iterator[InputBlock]:
        """Yields the texts of the rows [start, stop) under all keys, about `block_bytes` per block."""
        ...


def is_table(path: str) -> bool:
    """Returns True if an input is a database or a dataset, not a file."""
    return path.startswith(_HUB) or is_store_address(path)


def is_saved_data(path: str) -> bool:
    """Returns True if a folder was written by `save_to_disk` of the datasets library."""
    return any(os.path.isfile(os.path.join(path, name)) for name in _SAVED)


def tables_of(value: str) -> list[str]:
    """Returns the tables in a value of `--input`, each as a separate input.

    Raises:
        ConfigError: not an address.
        DataError: a table is missing.
        StorageError: the database cannot be reached, or is locked.
    """
    if value.startswith(_HUB):
        return [value]
    names: list[str] = _stores().table_names(value)
    return names


def open_table(path: str) -> InputTable:
    """Opens one of the inputs returned by `tables_of`.

    Raises:
        ConfigError: not an address, several tables, or a package is missing.
        DataError: the table does not exist.
        StorageError: the database cannot be reached, or is locked.
    """
    module = import_module("trident.corpus.inputs.hub_rows") if path.startswith(_HUB) else _stores()
    table: InputTable = module.open_table(path)
    return table


def _stores() -> Any:
    return import_module("trident.corpus.stores.store_table")
