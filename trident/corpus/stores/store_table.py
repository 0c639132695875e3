"""A table of a document store as an input: its rows become JSON lines."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from typing import Any

from megatron import log
from megatron.data.stores.address import StoreAddress
from megatron.data.stores.backend import PLAIN_COLUMN, CollectionFacts
from megatron.data.stores.document_store import open_backend, select_collections, text_column
from megatron.errors import ConfigError
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.lines import LONG_LINE_BYTES
from trident.corpus.inputs.tables import InputTable


def table_names(value: str) -> list[str]:
    """Returns the addresses of all tables at an address, in order."""
    address = StoreAddress.of(value)
    return [address.only(name) for name in select_collections(open_backend(address), address.collections)]


def open_table(path: str) -> StoreTable:
    """Opens the table at one of these addresses."""
    return StoreTable(path)


class StoreTable(InputTable):
    """One table of a SQLite file, or one collection of MongoDB.

    Args:
        path: its address.
    """

    def __init__(self, path: str) -> None:
        self._address = StoreAddress.of(path)
        self._shown = self._address.shown
        self._backend = open_backend(self._address)
        names = select_collections(self._backend, self._address.collections)
        if len(names) != 1:
            raise ConfigError(f"{self._shown} holds {len(names)} tables ({', '.join(names[:8])}); select one.")
        self._name = names[0]
        self._facts: CollectionFacts = self._backend.facts(self._name)

    @cached_property
    def rows(self) -> int:
        return self._backend.count(self._name, self._facts.counted)

    @property
    def file(self) -> str | None:
        return self._address.target if self._address.kind == "sqlite" else None

    def size_bytes(self, start: int, stop: int | None) -> int | None:
        if self._address.kind != "sqlite":
            return None
        size = os.path.getsize(self._address.target)
        if start == 0 and stop is None:
            return size
        rows = max(1, self.rows)
        return size * min(rows if stop is None else stop, rows) // rows - size * start // rows

    def check(self, keys: Sequence[str]) -> None:
        self._columns(keys)
        if self._facts.counted and self.rows < self._facts.counted:
            log.warning(
                f"{self._shown}: {self._facts.counted - self.rows} of the {self._facts.counted} documents that "
                "meta_info counts are missing (gaps in idx); the others are read. tools/corpus/corpus_store.py stat "
                "lists the indices."
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
        available, column = self._facts.columns, self._address.column
        if not available:  # an empty collection
            return list(keys)
        if column is not None and len(keys) > 1:
            raise ConfigError(
                f"{self._shown}: column= selects one column, but --json-keys has {len(keys)}: {' '.join(keys)}. Remove "
                "column=: every key is the column of its name."
            )
        if column is not None or list(keys) == [PLAIN_COLUMN]:
            return [text_column(self._shown, self._name, available, column)]
        return [text_column(self._shown, self._name, available, None if key == PLAIN_COLUMN else key) for key in keys]


def _line(keys: Sequence[str], values: Sequence[Any]) -> bytes:
    try:
        return _DUMPS({key: _text(value) for key, value in zip(keys, values, strict=True)}) + b"\n"
    except (ValueError, TypeError):
        entries = [_written(key) + b":" + _written(value) for key, value in zip(keys, values, strict=True)]
        return b"{" + b",".join(entries) + b"}\n"


def _text(value: Any) -> str:
    """Returns the text of a value.

    Raises:
        UnicodeDecodeError, TypeError: not a text.
    """
    if type(value) is bytes:
        return value.decode("utf-8")
    if type(value) is not str:
        raise TypeError(value)
    return value


def _written(value: Any) -> bytes:
    """Converts a value to JSON; for a value that is not text, the reader of lines reports a fitting error."""
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
