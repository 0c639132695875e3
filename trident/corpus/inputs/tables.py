"""Inputs that are not files: tables of databases (see `data/stores/address.py`) and datasets of the `datasets`
library.

    sqlite:///corpus.db?table=web      mongodb://host/corpus?collection=web      db.json
    hf://name, hf://name:split, hf://name:configuration:split, hf://folder

Rows of a database are passed on as lines of JSON, so that the reader of lines reads them too; rows of a dataset in
Arrow's form, like rows of Parquet files. They come in order of idx or of their place, with memory that does not grow.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol

from megatron import log
from megatron.data.stores.address import StoreAddress, is_store_address
from megatron.data.stores.backend import PLAIN_COLUMN, CollectionFacts
from megatron.data.stores.document_store import chosen_collections, open_backend, text_column
from megatron.errors import ConfigError
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.hub_rows import open_rows
from trident.corpus.inputs.long_lines import LONG_LINE_BYTES
from trident.corpus.inputs.parquet import columns_of

_HUB = "hf://"


class InputTable(Protocol):
    """Rows with texts, in order."""

    @property
    def rows(self) -> int:
        """How many there are."""
        ...

    def size_bytes(self, start: int, stop: int | None) -> int | None:
        """What the rows [start, stop) take on disk, in bytes; None if unknown."""
        ...

    def check(self, keys: Sequence[str]) -> None:
        """Checks that there is a column for every key."""
        ...

    def blocks(self, keys: Sequence[str], start: int, stop: int | None, block_bytes: int) -> Iterator[InputBlock]:
        """The texts of the rows [start, stop) under all keys, about `block_bytes` per block."""
        ...


def is_table(path: str) -> bool:
    """Whether an input is a database or a dataset, not a file."""
    return path.startswith(_HUB) or is_store_address(path)


def tables_of(value: str) -> list[str]:
    """The tables that a value of `--input` names, each as an input of its own.

    Raises:
        ConfigError: it is not an address.
        DataError: a table is missing.
        StorageError: the database cannot be reached, or is locked.
    """
    if value.startswith(_HUB):
        return [value]
    address = StoreAddress.of(value)
    return [address.only(name) for name in chosen_collections(open_backend(address), address.collections)]


def open_table(path: str) -> InputTable:
    """Opens one of the inputs that `tables_of` gives.

    Raises:
        ConfigError: it is not an address, names several tables, or a package is missing.
        DataError: there is no such table.
        StorageError: the database cannot be reached, or is locked.
    """
    return _HubTable(path) if path.startswith(_HUB) else _StoreTable(path)


def file_beneath(path: str) -> str:
    """The file that holds an input: the SQLite file of a table, else what the input's name says."""
    if path.startswith(_HUB) or not is_store_address(path):
        return path
    return StoreAddress.of(path).place


class _StoreTable:
    def __init__(self, path: str) -> None:
        self._address = StoreAddress.of(path)
        self._shown = self._address.shown
        self._backend = open_backend(self._address)
        names = chosen_collections(self._backend, self._address.collections)
        if len(names) != 1:
            raise ConfigError(f"{self._shown} holds {len(names)} tables ({', '.join(names[:8])}); name one of them.")
        self._name = names[0]
        self._facts: CollectionFacts = self._backend.facts(self._name)

    @cached_property
    def rows(self) -> int:
        return self._backend.count(self._name, self._facts.counted)

    def size_bytes(self, start: int, stop: int | None) -> int | None:
        if self._address.kind != "sqlite":
            return None
        size = os.path.getsize(self._address.place)
        if start == 0 and stop is None:
            return size
        rows = max(1, self.rows)
        return size * min(rows if stop is None else stop, rows) // rows - size * start // rows

    def check(self, keys: Sequence[str]) -> None:
        self._columns(keys)
        if self._facts.counted and self.rows < self._facts.counted:
            log.warning(
                f"{self._shown}: {self._facts.counted - self.rows} of the {self._facts.counted} documents that "
                "meta_info counts are missing (holes in idx); the others are read. tools/corpus/corpus_store.py stat "
                "lists the numbers."
            )

    def blocks(self, keys: Sequence[str], start: int, stop: int | None, block_bytes: int) -> Iterator[InputBlock]:
        columns = self._columns(keys)
        limit = -1 if stop is None else stop - start
        held: list[bytes] = []
        size = done = offset = reached = 0
        try:
            for _, values in self._backend.scan(self._name, columns, start, limit):
                line = _line(keys, values)
                if held and (size >= block_bytes or len(line) >= LONG_LINE_BYTES):
                    taken = (self.size_bytes(start, start + done) or 0) - reached
                    yield self._block(held, offset, size, taken, start)
                    held, size, offset, reached = [], 0, offset + size, reached + taken
                held.append(line)
                size += len(line)
                done += 1
            if held:
                yield self._block(held, offset, size, (self.size_bytes(start, stop) or 0) - reached, start)
        finally:
            self._backend.close()

    def _block(self, lines: list[bytes], offset: int, size: int, taken: int, first: int) -> InputBlock:
        return InputBlock(self._shown, offset, size, b"".join(lines), taken, "jsonl", 0 if offset else first)

    def _columns(self, keys: Sequence[str]) -> list[str]:
        there, column = self._facts.columns, self._address.column
        if not there:  # an empty collection
            return list(keys)
        if column is not None and len(keys) > 1:
            raise ConfigError(
                f"{self._shown}: column= names one column, but --json-keys names {len(keys)}: {' '.join(keys)}. Leave "
                "column= out: every key is the column of its name."
            )
        if column is not None or list(keys) == [PLAIN_COLUMN]:
            return [text_column(self._shown, self._name, there, column)]
        return [text_column(self._shown, self._name, there, None if key == PLAIN_COLUMN else key) for key in keys]


class _HubTable:
    def __init__(self, path: str) -> None:
        name, split = path.removeprefix(_HUB), None
        if not name:
            raise ConfigError(f"--input {path} names no dataset. Write hf://name, hf://name:split or hf://folder.")
        if not os.path.exists(name):
            parts = name.split(":")
            name, split = ":".join(parts[:-1]) or name, parts[-1] if len(parts) > 1 else None
        self._data = open_rows([name], split)

    @property
    def rows(self) -> int:
        return len(self._data)

    def size_bytes(self, start: int, stop: int | None) -> int | None:
        return None

    def check(self, keys: Sequence[str]) -> None:
        columns_of(self._data.table.column_names, self._data.title, keys)

    def blocks(self, keys: Sequence[str], start: int, stop: int | None, block_bytes: int) -> Iterator[InputBlock]:
        rows = range(start, len(self._data) if stop is None else min(stop, len(self._data)))
        for block in self._data.blocks(keys, rows, block_bytes):
            yield block if block.start else replace(block, first_line=start)


def _line(keys: Sequence[str], values: Sequence[Any]) -> bytes:
    """A row as a line of JSON."""
    try:
        return _DUMPS({key: _text(value) for key, value in zip(keys, values, strict=True)}) + b"\n"
    except (ValueError, TypeError):
        entries = [_written(key) + b":" + _written(value) for key, value in zip(keys, values, strict=True)]
        return b"{" + b",".join(entries) + b"}\n"


def _text(value: Any) -> str:
    """The text in a column.

    Raises:
        UnicodeDecodeError, TypeError: there is none.
    """
    if type(value) is bytes:
        return value.decode("utf-8")
    if type(value) is not str:
        raise TypeError(value)
    return value


def _written(value: Any) -> bytes:
    """A value as JSON; what is not text keeps a form that readers of lines refuse with a fitting message."""
    if isinstance(value, bytes):
        try:
            value = value.decode("utf-8")
        except UnicodeDecodeError:
            return b'"' + value.replace(b"\n", b" ").replace(b"\r", b" ") + b'"'
    return json.dumps(value, ensure_ascii=False, default=_no_text).encode("utf-8", "backslashreplace")


def _no_text(value: object) -> dict[str, object]:
    return {}


def _standard_dumps(entry: dict[str, str]) -> bytes:
    return json.dumps(entry, ensure_ascii=False, separators=(",", ":")).encode()


def _fastest_dumps() -> Callable[[Any], bytes]:
    try:
        import orjson
    except ImportError:
        return _standard_dumps
    return orjson.dumps


_DUMPS = _fastest_dumps()
