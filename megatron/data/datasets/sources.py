"""What a data prefix names: a pair of token files, Parquet windows or a document store."""

from __future__ import annotations

import functools
import glob
import os
from pathlib import Path

from megatron.data.datasets.parquet_rows import ParquetRows, check_window_length
from megatron.data.datasets.rows import RowSource
from megatron.data.datasets.store_rows import DocumentEncoder, StoreRows, store_fingerprint
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.windows import WindowFile, expand_windows, names_windows
from megatron.data.stores.address import StoreAddress, is_store_address
from megatron.data.stores.document_store import open_store
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.record import check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer

_ADVICE = ", or preprocess the corpus again"


class DataSources:
    """The sources of a run by prefix, each opened once.

    Args:
        sequence_length: tokens of a sample, without the one that is only a label.
        layout: what `--data-impl` says of token files.
        tokenizer: of the run; without it no document store can be read, and windows are not checked to be of it.

    Raises:
        ConfigError, DataError, StorageError: on access, see the source's class.
    """

    def __init__(self, sequence_length: int, layout: str, tokenizer: Tokenizer | None) -> None:
        self.sequence_length = sequence_length
        self._layout = layout
        self._tokenizer = tokenizer
        self._opened: dict[str, IndexedDataset | RowSource] = {}

    def __getitem__(self, prefix: str) -> IndexedDataset | RowSource:
        if prefix not in self._opened:
            source = self._open(prefix)
            self._opened[prefix] = self._opened[source.prefix] = source
        return self._opened[prefix]

    def _open(self, prefix: str) -> IndexedDataset | RowSource:
        if is_store_address(prefix):
            return StoreRows(prefix, self._encoder)
        if _is_windows(prefix):
            rows = ParquetRows(prefix)
            check_window_length(prefix, rows.row_length, self.sequence_length)
            if self._tokenizer is not None:
                for record in rows.tokenizers:
                    check_same_tokenizer(f"the data {prefix} was made", record, self._tokenizer, advice=_ADVICE)
            return rows
        indexed = IndexedDataset(prefix)
        check_layout(indexed, self._layout)
        return indexed

    @functools.cached_property
    def _encoder(self) -> DocumentEncoder:
        if self._tokenizer is None:
            raise ConfigError(
                "A document store is encoded while it is read, which needs a tokenizer (--tokenizer-type)."
            )
        return DocumentEncoder(self._tokenizer, self.sequence_length)


def check_layout(indexed: IndexedDataset, data_impl: str) -> None:
    """Checks that a token file has the layout that `--data-impl` names; cached and lazy are one layout.

    Raises:
        DataError: it has the other one.
    """
    wanted = {"mmap": "mmap", "cached": "cached", "lazy": "cached"}.get(data_impl, indexed.layout)
    if indexed.layout != wanted:
        names = {"mmap": "mmap", "cached": "cached or lazy"}
        raise DataError(
            f"--data-impl {data_impl} was given, but {indexed.idx_path} has the layout {names[indexed.layout]}. Drop "
            f"--data-impl (the layout is then read from the file) or give --data-impl {names[indexed.layout]}."
        )


def check_source(prefix: str, sequence_length: int) -> None:
    """Checks that the files of a source exist, and the length of windows in their first file.

    Raises:
        ConfigError: windows have another length, an address cannot be read, or pyarrow is missing.
        DataError: a file is missing.
    """
    if is_store_address(prefix):
        address = StoreAddress.of(prefix)
        address.check_password()
        if address.kind == "sqlite" and not os.path.isfile(address.place):
            open_store(address)  # raises the error
        return
    if _is_windows(prefix):
        with WindowFile(expand_windows([prefix])[0]) as file:
            check_window_length(prefix, file.sequence_length, sequence_length)
    elif not all(Path(prefix + suffix).is_file() for suffix in (".idx", ".bin")):
        IndexedDataset(prefix)  # raises the error


@functools.lru_cache(maxsize=1024)
def source_facts(prefix: str) -> tuple[tuple[str, int | str], ...]:
    """Facts that identify the data of a prefix; cached, since every save asks for them and a run's data do not
    change.
    """
    if is_store_address(prefix):
        store = open_store(prefix)
        return ("documents", len(store)), ("sha256", store_fingerprint(store))
    if _is_windows(prefix):
        rows = ParquetRows(prefix)
        return ("windows", len(rows)), ("tokens_per_window", rows.row_length), ("sha256", rows.fingerprint)
    indexed = IndexedDataset(prefix)
    return (
        ("sequences", len(indexed)),
        ("tokens", indexed.tokens),
        ("dtype", indexed.dtype.name),
        ("sha256", indexed.fingerprint),
    )


def source_folder(prefix: str) -> Path:
    """The folder that a source lies in; the current one for a database that is not a file."""
    if is_store_address(prefix):
        address = StoreAddress.of(prefix)
        return Path(address.place).parent if address.kind == "sqlite" else Path()
    return Path(expand_windows([prefix])[0] if _is_windows(prefix) else prefix).parent


def _is_windows(prefix: str) -> bool:
    """Whether a prefix that names no store means Parquet files; a pattern is never a pair of token files."""
    return names_windows(prefix) or (glob.has_magic(prefix) and not os.path.exists(f"{prefix}.idx"))
