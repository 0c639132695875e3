"""What a data prefix names: a pair of token files, Parquet windows, a document store, or inputs with their targets."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Callable
from pathlib import Path

from megatron.config.sections.loss import CAUSAL, MULTITASK
from megatron.data.datasets.pairs import PackedPairs, TokenPairs, names_pairs, pair_prefixes
from megatron.data.datasets.parquet_rows import ParquetRows, check_window_length
from megatron.data.datasets.rows import RowSource
from megatron.data.datasets.store_rows import DocumentEncoder, StoreRows, store_fingerprint
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.windows import WindowFile, expand_windows, names_windows
from megatron.data.order.index_cache import IndexCache
from megatron.data.order.plan import SourcePlan
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
        seed: of the run; pairs are shuffled by it before they are packed.
        cache: where the index arrays of a prefix are kept.

    Raises:
        ConfigError, DataError, StorageError: on access, see the source's class.
    """

    def __init__(
        self,
        sequence_length: int,
        layout: str,
        tokenizer: Tokenizer | None,
        seed: int,
        cache: Callable[[str], IndexCache],
    ) -> None:
        self.sequence_length = sequence_length
        self._layout = layout
        self._tokenizer = tokenizer
        self._seed = seed
        self._cache = cache
        self._opened: dict[str, IndexedDataset | RowSource | TokenPairs] = {}
        self._packed: dict[str, PackedPairs] = {}

    def packed(self, pairs: TokenPairs, first: int, last: int) -> PackedPairs:
        """The rows that the pairs [first, last) fill."""
        padding_id = (self._tokenizer.eod_id if self._tokenizer else None) or 0
        cache = self._cache(pairs.prefix)
        rows = PackedPairs(pairs, first, last, self.sequence_length, self._seed, padding_id, cache)
        return self._packed.setdefault(rows.fingerprint, rows)

    def planned(self, source: SourcePlan) -> IndexedDataset | RowSource:
        """What a source of a plan was made from.

        Raises:
            DataError: it was packed from pairs that the flags do not name now.
        """
        if source.fingerprint in self._packed:
            return self._packed[source.fingerprint]
        found = self[source.prefix]
        if isinstance(found, TokenPairs):
            raise DataError(
                f"The order of samples was planned with other ranges of the pairs {source.prefix} than the flags name "
                "now. Use the same files and ranges."
            )
        return found

    def __getitem__(self, prefix: str) -> IndexedDataset | RowSource | TokenPairs:
        if prefix not in self._opened:
            source = self._open(prefix)
            self._opened[prefix] = self._opened[source.prefix] = source
        return self._opened[prefix]

    def _open(self, prefix: str) -> IndexedDataset | RowSource | TokenPairs:
        if is_store_address(prefix):
            return StoreRows(prefix, self._encoder)
        if _is_windows(prefix):
            rows = ParquetRows(prefix)
            check_window_length(prefix, rows.row_length, self.sequence_length)
            if self._tokenizer is not None:
                for record in rows.tokenizers:
                    check_same_tokenizer(f"the data {prefix} was made", record, self._tokenizer, advice=_ADVICE)
            return rows
        if names_pairs(prefix):
            pairs = TokenPairs(prefix)
            check_layout(pairs.inputs, self._layout)
            check_layout(pairs.targets, self._layout)
            return pairs
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


def check_source(prefix: str, sequence_length: int, objective: str = CAUSAL) -> None:
    """Checks that the files of a source exist and fit the objective, and the length of windows in their first file.

    Raises:
        ConfigError: windows have another length, an address cannot be read, pyarrow is missing, or the objective
            needs another kind of source.
        DataError: a file is missing.
    """
    _check_kind(prefix, objective)
    if is_store_address(prefix):
        address = StoreAddress.of(prefix)
        address.check_password()
        if address.kind == "sqlite" and not os.path.isfile(address.place):
            open_store(address)  # raises the error
        return
    if _is_windows(prefix):
        with WindowFile(expand_windows([prefix])[0]) as file:
            check_window_length(prefix, file.sequence_length, sequence_length)
    elif names_pairs(prefix):
        TokenPairs(prefix)
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
    if names_pairs(prefix):
        pairs = TokenPairs(prefix)
        tokens = pairs.inputs.tokens + pairs.targets.tokens
        return ("pairs", len(pairs)), ("tokens", tokens), ("sha256", pairs.fingerprint)
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


def token_files(prefix: str) -> tuple[str, ...]:
    """The prefixes of the token files that a source consists of; of any other source only its own."""
    return pair_prefixes(prefix) if not is_store_address(prefix) and names_pairs(prefix) else (prefix,)


def _check_kind(prefix: str, objective: str) -> None:
    """Checks that multitask training gets pairs, and only it.

    Raises:
        ConfigError: pairs are to be trained on in another way.
        DataError: there are no pairs.
    """
    is_pairs = not is_store_address(prefix) and names_pairs(prefix)
    if is_pairs and objective != MULTITASK:
        raise ConfigError(
            f"{prefix} names inputs and targets ({prefix}_inputs_document.idx), which --objective {objective} does not "
            f"train on. Use --objective {MULTITASK} (finetune_t0_non_causal_decoder.py), or name one of the two."
        )
    if objective == MULTITASK and not is_pairs:
        raise DataError(
            f"--objective {MULTITASK} trains on pairs of inputs and targets, and there is no {prefix}_inputs_document"
            f".idx beside a {prefix}_targets_document.idx. Make both with tools/preprocess_data.py --json-keys inputs "
            "targets --output-prefix PREFIX, and give --data-path PREFIX."
        )


def _is_windows(prefix: str) -> bool:
    """Whether a prefix that names no store means Parquet files; a pattern is never a pair of token files."""
    return names_windows(prefix) or (glob.has_magic(prefix) and not os.path.exists(f"{prefix}.idx"))
