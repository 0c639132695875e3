"""Data sets of the optional library `datasets` (a hub name, or a local folder of data files) to blocks of rows."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from megatron.corpus.block import Block
from megatron.errors import ConfigError, DataError

_BATCH_ROWS = 1024


@dataclass(frozen=True)
class HubSource:
    """A split of a data set.

    Args:
        configuration: of a data set that has several.
    """

    name: str
    configuration: str | None = None
    split: str = "train"


def hub_size(source: HubSource) -> tuple[int, int]:
    """Rows of a data set, and about how many bytes they take.

    Raises:
        ConfigError: the library is missing or knows no such data set.
    """
    rows = _loaded(source)
    return len(rows), int(rows.data.nbytes)


def hub_blocks(
    source: HubSource, keys: Sequence[str], block_bytes: int, first: int = 0, last: int | None = None
) -> Iterator[Block]:
    """Blocks of about `block_bytes` with the columns of all keys of the rows [first, last), in their order.

    The library keeps a copy of the data set in its cache, which is mapped: memory does not grow with it. Only a hub
    name touches the network.

    Raises:
        ConfigError: the library is missing, knows no such data set, or it has no such column.
        DataError: rows cannot be read.
    """
    rows = _loaded(source)
    columns = list(dict.fromkeys(key if key in rows.column_names else key.split(".")[0] for key in keys))
    missing = [column for column in columns if column not in rows.column_names]
    if missing:
        raise ConfigError(
            f"--dataset-name {source.name}: there is no column {missing[0]!r} (--json-key); it has "
            f"{', '.join(map(repr, rows.column_names[:8]))}."
        )
    if first or last is not None:
        rows = rows.select(range(first, len(rows) if last is None else last))
    return row_blocks(rows.select_columns(columns), f"{source.name}:{source.split}", block_bytes)


def row_blocks(rows: Any, source: str, block_bytes: int) -> Iterator[Block]:
    """All columns of the library's `Dataset`, in its order, as blocks.

    Raises:
        DataError: rows cannot be read.
    """
    arrow = importlib.import_module("pyarrow")
    held: list[Any] = []
    start = done = 0
    batches = rows.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    while True:
        try:
            table = next(batches, None)
        except Exception as failure:
            raise DataError(
                f"{source}: rows from {done} on cannot be read: {failure}. Load the data set again."
            ) from failure
        if held and (table is None or sum(one.nbytes for one in held) >= block_bytes):
            sink = arrow.BufferOutputStream()
            with arrow.ipc.new_stream(sink, held[0].schema) as writer:
                for one in held:
                    writer.write_table(one)
            data = bytes(sink.getvalue())
            yield Block(source, start, len(data), data, 0, "parquet")
            start += len(data)
            held = []
        if table is None:
            return
        held.append(table)
        done += len(table)


def datasets_library(why: str) -> Any:
    """The library itself.

    Args:
        why: begins the sentence that says it is missing.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return importlib.import_module("datasets")
    except ImportError as failure:
        raise ConfigError(
            f"{why} needs the datasets package: pip install datasets, or give files with --input."
        ) from failure


def _loaded(source: HubSource) -> Any:
    name, configuration, split = source.name, source.configuration, source.split
    library = datasets_library(f"--dataset-name {name}")
    try:
        return library.load_dataset(name, configuration, split=split)
    except Exception as failure:  # whatever the library and the builders of its data sets raise
        reason = next(iter(str(failure).splitlines()), "")[:300]
        raise ConfigError(
            f"--dataset-name {name} (--dataset-sub-name {configuration}, --dataset-split-type {split}) cannot be "
            f"loaded: {type(failure).__name__}: {reason}. Check the names and the network, or give a local folder."
        ) from failure
