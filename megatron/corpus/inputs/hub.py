"""The optional library `datasets`: itself, and its rows as blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from megatron.corpus.inputs.block import Block
from megatron.errors import ConfigError, DataError

_BATCH_ROWS = 1024


def row_blocks(rows: Any, source: str, block_bytes: int) -> Iterator[Block]:
    """All columns of the library's `Dataset`, in its order, as blocks.

    Raises:
        DataError: rows cannot be read.
    """
    import pyarrow as arrow

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
        if held and (table is None or sum(part.nbytes for part in held) >= block_bytes):
            sink = arrow.BufferOutputStream()
            with arrow.ipc.new_stream(sink, held[0].schema) as writer:
                for part in held:
                    writer.write_table(part)
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
        import datasets
    except ImportError as failure:
        raise ConfigError(
            f"{why} needs the datasets package: pip install datasets, or give files with --input."
        ) from failure
    return datasets
