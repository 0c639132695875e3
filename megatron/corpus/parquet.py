"""Parquet files to blocks and blocks to texts, with the optional package pyarrow.

The process that cuts the inputs decodes only the wanted columns and hands rows on in Arrow's own form, which a worker
reads without parsing.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError

_BATCH_ROWS = 1024


def check_parquet(path: str, keys: Sequence[str]) -> None:
    """Checks that a file can be read and holds the columns of all keys.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: it is no Parquet file, or a column is missing.
    """
    with _open(path) as file:
        _columns(file, path, keys)


def parquet_rows(path: str, keys: Sequence[str], block_bytes: int) -> Iterator[tuple[bytes, int]]:
    """Batches of rows as Arrow streams, about `block_bytes` each, and how many rows each has.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: the file is damaged, or a column is missing.
    """
    arrow = _pyarrow("pyarrow", path)
    with _open(path) as file:
        columns = _columns(file, path, keys)
        held: list[Any] = []
        rows = 0
        try:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False):
                held.append(batch)
                if sum(one.nbytes for one in held) >= block_bytes:
                    yield _packed(arrow, held), sum(one.num_rows for one in held)
                    rows += sum(one.num_rows for one in held)
                    held = []
        except (OSError, arrow.ArrowException) as failure:
            raise DataError(
                f"{path}: cannot be read past row {rows}: {failure}. The file is damaged; fetch it again or leave it "
                "out."
            ) from failure
        if held:
            yield _packed(arrow, held), sum(one.num_rows for one in held)


def parquet_texts(data: bytes, keys: Sequence[str]) -> list[list[Any]]:
    """For each key, the values of all rows of a block; None where there is none. `a.b` is field b of column a."""
    ipc = importlib.import_module("pyarrow.ipc")
    with ipc.open_stream(data) as reader:
        table = reader.read_all()
    found = []
    for key in keys:
        if key in table.column_names:
            found.append(table.column(key).to_pylist())
            continue
        first, *rest = key.split(".")
        values = table.column(first).to_pylist()
        for name in rest:
            values = [value.get(name) if isinstance(value, dict) else None for value in values]
        found.append(values)
    return found


def _packed(arrow: Any, batches: list[Any]) -> bytes:
    sink = arrow.BufferOutputStream()
    with arrow.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write_batch(batch)
    return bytes(sink.getvalue())


def _open(path: str) -> Any:
    parquet = _pyarrow("pyarrow.parquet", path)
    try:
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as failure:
        raise DataError(f"{path} is not a Parquet file that can be read: {failure}.") from failure


def _columns(file: Any, path: str, keys: Sequence[str]) -> list[str]:
    names = file.schema_arrow.names
    columns = []
    for key in keys:
        column = key if key in names else key.split(".")[0]
        if column not in names:
            raise DataError(
                f"{path}: there is no column {key!r} (--json-keys); it has {', '.join(map(repr, names[:8])) or 'none'}."
            )
        columns.append(column)
    return list(dict.fromkeys(columns))


def _pyarrow(name: str, path: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as failure:
        raise ConfigError(
            f"--input {Path(path)} needs the pyarrow package: pip install pyarrow, or turn the file into jsonl first."
        ) from failure
