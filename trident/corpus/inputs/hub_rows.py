"""Rows read by the optional `datasets` library: datasets of the Hugging Face Hub, their local copies, and files.

The library caches a dataset as Arrow tables, so that rows can be counted, drawn in any order and divided among ranks.
Blocks carry them in Arrow's format, like blocks of Parquet files.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from megatron.errors import ConfigError, DataError
from trident.corpus.inputs.block import InputBlock
from trident.corpus.inputs.compressed import COMPRESSIONS
from trident.corpus.inputs.parquet import columns_of, packed
from trident.corpus.inputs.tables import InputTable, is_saved_data

_BATCH_ROWS = 1024
_DEFAULT_SPLIT = "train"
_JSON = dict.fromkeys((".jsonl", ".json", ".ndjson"), "json")
_BUILDERS = {**_JSON, ".parquet": "parquet", ".txt": "text", ".csv": "csv", ".arrow": "arrow"}

Rows = range | npt.NDArray[np.int64]


@dataclass(frozen=True)
class HubRows(InputTable):
    """A dataset, or one split of it; an `InputTable`.

    Args:
        title: its name in messages.
        table: the library's `Dataset`.
    """

    title: str
    table: Any

    file = None  # many, in the library's cache

    @property
    def rows(self) -> int:
        return len(self.table)

    def size_bytes(self, start: int, stop: int | None) -> int | None:
        return None

    def check(self, keys: Sequence[str]) -> None:
        columns_of(self.table.column_names, self.title, keys)

    def blocks(self, keys: Sequence[str], start: int, stop: int | None, block_bytes: int) -> Iterator[InputBlock]:
        rows = range(start, self.rows if stop is None else min(stop, self.rows))
        for block in self.drawn_blocks(keys, rows, block_bytes):
            yield block if block.start else replace(block, first_line=start)

    def drawn_blocks(self, keys: Sequence[str], rows: Rows, block_bytes: int) -> Iterator[InputBlock]:
        """Yields the columns of some rows, in the given order, as blocks.

        Raises:
            DataError: a column is missing, or the library cannot read the rows.
        """
        chosen = self.table.select_columns(columns_of(self.table.column_names, self.title, keys)).select(rows)
        return row_blocks(chosen, self.title, block_bytes)


def drawn_rows(total: int, count: int | None, seed: int | None) -> Rows:
    """Returns the indices of the first `count` rows, shuffled first if a seed is given.

    Source: bigscience Megatron-DeepSpeed `tools/preprocess_data_dist.py`, which shuffles with numpy's `default_rng`.
    """
    rows: Rows = range(total)
    if seed is not None:
        rows = np.arange(total, dtype=np.int64)
        np.random.default_rng(seed).shuffle(rows)
    return rows if count is None else rows[:count]


def is_hub_name(value: str) -> bool:
    """Returns True if a value of `--input` neither exists here nor looks like a file, a pattern or an address."""
    is_like_a_file = Path(value).suffix.lower() in (*_BUILDERS, *COMPRESSIONS) or glob.has_magic(value)
    return not (is_like_a_file or "://" in value or os.path.exists(value))


def open_table(address: str) -> HubRows:
    """Opens the dataset or the folder of an `hf://` address, see `InputTable`.

    Raises:
        ConfigError, DataError: as `open_rows`, or the name is missing.
    """
    name, split = address.removeprefix("hf://"), None
    if not name:
        raise ConfigError(f"--input {address} names no dataset. Use hf://name, hf://name:split or hf://folder.")
    if not os.path.exists(name):
        parts = name.split(":")
        name, split = ":".join(parts[:-1]) or name, parts[-1] if len(parts) > 1 else None
    return open_rows([name], split)


def open_rows(inputs: Sequence[str], split: str | None) -> HubRows:
    """Opens files of one kind, or one dataset: a folder, or a Hub name, optionally `name:configuration`.

    Args:
        split: a split or the library's expression for a part of one (`train[:10%]`); train by default.

    Raises:
        ConfigError: the library is not installed, or the inputs are of several kinds.
        DataError: the library cannot read them.
    """
    if len(inputs) > 1 and not all(map(os.path.isfile, inputs)):
        raise ConfigError(f"--input {' '.join(inputs[:3])}: give files of one kind, or one dataset.")
    library = datasets_library(f"--input {inputs[0]} (a name that is not a file, or --split, --count or --shuffle)")
    split_name = split or _DEFAULT_SPLIT
    title = f"{', '.join(inputs[:3])}{', ...' * (len(inputs) > 3)} ({split_name})"
    try:
        if is_saved_data(inputs[0]):
            table = _saved(library, inputs[0], split)
        elif all(map(os.path.isfile, inputs)):
            table = library.load_dataset(_builder(inputs), data_files=list(inputs), split=split_name)
        elif os.path.isdir(inputs[0]):
            table = library.load_dataset(inputs[0], split=split_name)
        else:
            name, _, configuration = inputs[0].partition(":")
            table = library.load_dataset(name, configuration or None, split=split_name)
    except (ConfigError, DataError, KeyboardInterrupt):
        raise
    except Exception as failure:  # the library and its dependencies raise errors of every kind
        raise DataError(
            f"--input {' '.join(inputs[:3])} (--split {split_name}) cannot be read by the datasets library: "
            f"{_first_line(failure)}. Use files, a folder, or the name of a dataset on the Hugging Face Hub that is "
            "reachable or cached."
        ) from failure
    return HubRows(title, table)


def _saved(library: Any, path: str, split: str | None) -> Any:
    saved = library.load_from_disk(path)
    if not isinstance(saved, dict):
        if split is not None and saved.split is not None and str(saved.split) != split:
            raise DataError(f"--input {path} is the split {saved.split}, not {split}. Remove --split.")
        return saved
    split_name = split or _DEFAULT_SPLIT
    if split_name not in saved:
        raise DataError(f"--input {path} has no split {split_name!r} (--split); it has {', '.join(map(repr, saved))}.")
    return saved[split_name]


def _builder(files: Sequence[str]) -> str:
    suffixes = set()
    for file in files:
        path = Path(file)
        suffixes.add(Path(path.stem).suffix.lower() if path.suffix.lower() in COMPRESSIONS else path.suffix.lower())
    builders = {_BUILDERS.get(suffix) for suffix in suffixes}
    builder = builders.pop() if len(builders) == 1 else None
    if builder is None:
        raise ConfigError(
            f"--input lists files that end in {', '.join(sorted(suffixes))}; to count, shuffle or split them, use "
            f"files of one kind: {', '.join(_BUILDERS)}."
        )
    return builder


def _first_line(failure: BaseException) -> str:
    lines = str(failure).strip().splitlines()
    return (lines[0][:300] if lines else type(failure).__name__).rstrip(".")


def row_blocks(rows: Any, source: str, block_bytes: int) -> Iterator[InputBlock]:
    """Yields all columns of the library's `Dataset`, in order, as blocks.

    Raises:
        DataError: rows cannot be read.
    """
    start = 0
    for data in packed(_tables(rows, source), block_bytes):
        yield InputBlock(source, start, len(data), data, 0, "parquet")
        start += len(data)


def _tables(rows: Any, source: str) -> Iterator[Any]:
    done = 0
    batches = rows.with_format("arrow").iter(batch_size=_BATCH_ROWS)
    while True:
        try:
            table = next(batches, None)
        except Exception as failure:
            raise DataError(
                f"{source}: rows from {done} on cannot be read: {failure}. Load the dataset again."
            ) from failure
        if table is None:
            return
        yield table
        done += len(table)


def datasets_library(why: str) -> Any:
    """Imports the library.

    Args:
        why: beginning of the error if it is missing.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import datasets
    except ImportError as failure:
        raise ConfigError(
            f"{why} requires the datasets package: pip install datasets, or use files with --input."
        ) from failure
    return datasets
