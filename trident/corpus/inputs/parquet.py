"""Converts Parquet files to blocks and blocks to texts, with the optional package pyarrow.

The process that cuts the inputs decodes only the requested columns and sends rows in Arrow's format, which workers read
without parsing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from megatron.errors import ConfigError, DataError
from megatron.files.formats import recognized_file
from megatron.files.plain import check_plain

_BATCH_ROWS = 1024
_LONGEST_FREE_BYTES = 64 << 20  # column chunks up to this size may have any ratio
_LARGEST_RATIO = 100  # text is compressed by 3 to 10


def check_parquet(path: str, keys: Sequence[str]) -> None:
    """Checks that a file can be read and holds the columns of all keys.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: not a Parquet file, or a column is missing.
    """
    with _open(path) as file:
        columns_of(file.schema_arrow.names, path, keys)


def parquet_rows(path: str, keys: Sequence[str], block_bytes: int) -> Iterator[bytes]:
    """Yields the rows of a file as Arrow streams, about `block_bytes` each.

    Raises:
        ConfigError: pyarrow is missing.
        DataError: the file is damaged, or a column is missing.
    """
    yield from packed(_batches(path, keys), block_bytes)


def packed(batches: Iterable[Any], block_bytes: int) -> Iterator[bytes]:
    """Yields batches of rows, or tables, as Arrow streams of about `block_bytes` each."""
    held: list[Any] = []
    for batch in batches:
        held.append(batch)
        if sum(part.nbytes for part in held) >= block_bytes:
            yield _stream(held)
            held = []
    if held:
        yield _stream(held)


def parquet_texts(data: bytes, keys: Sequence[str]) -> list[list[Any]]:
    """Returns the values of all rows of a block for each key: None if missing, bytes if a text is not UTF-8.

    `a.b` is field b of column a.
    """
    from pyarrow import ipc

    with ipc.open_stream(data) as reader:
        table = reader.read_all()
    columns = []
    for key in keys:
        first, *rest = [key] if key in table.column_names else key.split(".")
        values = _values(table.column(first))
        for name in rest:
            values = [value.get(name) if isinstance(value, dict) else None for value in values]
        columns.append([_decoded(value) if isinstance(value, bytes) else value for value in values])
    return columns


def _decoded(value: bytes) -> str | bytes:
    """Decodes the text in a column of type BINARY, which some writers use for text."""
    try:
        return value.decode()
    except UnicodeDecodeError:
        return value


def columns_of(names: Sequence[str], title: str, keys: Sequence[str]) -> list[str]:
    """Returns the columns that hold the keys, without duplicates; `a.b` is field b of column a.

    Raises:
        DataError: a column is missing.
    """
    columns = []
    for key in keys:
        column = key if key in names else key.split(".")[0]
        if column not in names:
            raise DataError(
                f"{title}: no column {key!r} (--json-keys); it has {', '.join(map(repr, names[:8])) or 'none'}."
            )
        columns.append(column)
    return list(dict.fromkeys(columns))


def _batches(path: str, keys: Sequence[str]) -> Iterator[Any]:
    arrow, _ = _pyarrow(path)
    rows = 0
    with _open(path) as file:
        columns = columns_of(file.schema_arrow.names, path, keys)
        _check_counts(file.metadata, path)
        _check_ratios(file.metadata, path, columns)
        try:
            for batch in file.iter_batches(batch_size=_BATCH_ROWS, columns=columns, use_threads=False):
                yield batch
                rows += batch.num_rows
        except (OSError, arrow.ArrowException) as failure:
            raise DataError(
                f"{path}: cannot be read past row {rows}: {failure}. The file is damaged; download it again or remove "
                "it."
            ) from failure
        if rows != file.metadata.num_rows:
            raise DataError(
                f"{path}: its footer counts {file.metadata.num_rows} rows, but only {rows} could be read. The file is "
                "damaged; download it again or remove it."
            )


def _stream(batches: list[Any]) -> bytes:
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batches[0].schema) as writer:
        for batch in batches:
            writer.write(batch)
    return bytes(sink.getvalue())


def _values(column: Any) -> list[Any]:
    """Returns the values of a column; bytes for a text that is not UTF-8, which Parquet permits."""
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        return [_value(scalar) for scalar in column]


def _value(scalar: Any) -> Any:
    try:
        return scalar.as_py()
    except UnicodeDecodeError:
        return b"\xff"


def _open(path: str) -> Any:
    _, parquet = _pyarrow(path)
    try:
        check_plain(path)
        return parquet.ParquetFile(path)
    except (OSError, ValueError) as failure:
        text = f"{path} is not a readable Parquet file: {str(failure).rstrip('.')}. {recognized_file(path)}"
        raise DataError(text.rstrip(". ") + ".") from failure


def _check_counts(metadata: Any, path: str) -> None:
    """Checks that the numbers of rows in a footer agree; the library would skip rows silently.

    Raises:
        DataError: the numbers differ.
    """
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    if sum(group.num_rows for group in groups) != metadata.num_rows:
        raise DataError(
            f"{path}: its footer counts {metadata.num_rows} rows, but the row groups hold "
            f"{sum(group.num_rows for group in groups)}. The file is damaged; download it again or remove it."
        )
    for number, group in enumerate(groups):
        for column in range(group.num_columns):
            if metadata.schema.column(column).max_repetition_level == 0:
                values = group.column(column).num_values
                if values != group.num_rows:
                    raise DataError(
                        f"{path}: row group {number} has {group.num_rows} rows, but {values} values in column "
                        f"{group.column(column).path_in_schema!r}. The file is damaged; download it again or remove it."
                    )


def _check_ratios(metadata: Any, path: str, columns: Sequence[str]) -> None:
    """Checks that no requested column is a decompression bomb.

    Raises:
        DataError: a column is.
    """
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for chunk in map(group.column, range(group.num_columns)):
            size, held = chunk.total_uncompressed_size, chunk.total_compressed_size
            is_read = chunk.path_in_schema.split(".")[0] in columns
            if is_read and size > _LONGEST_FREE_BYTES and size > _LARGEST_RATIO * held:
                raise DataError(
                    f"{path}: row group {number} has {size:,} bytes of column {chunk.path_in_schema!r} in {held:,} "
                    "bytes of the file: a decompression bomb. If intended, write the file without compression."
                )


def _pyarrow(path: str) -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as failure:
        raise ConfigError(
            f"--input {Path(path)} requires the pyarrow package: pip install pyarrow, or convert the file to jsonl."
        ) from failure
    return pyarrow, pyarrow.parquet
