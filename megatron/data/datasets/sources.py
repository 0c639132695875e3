"""What a data prefix names: token files, Parquet windows, a document store, inputs with their targets, or examples."""

from __future__ import annotations

import functools
import glob
import os
from collections.abc import Callable
from pathlib import Path

from megatron.config.objective.loss import CAUSAL, MASKED, MULTITASK, PREFIX
from megatron.data.datasets.copied_prompts import CopiedPrompts
from megatron.data.datasets.examples.files import example_files, files_fingerprint, names_example_files
from megatron.data.datasets.examples.options import ExampleOptions
from megatron.data.datasets.examples.rows import ExampleRows
from megatron.data.datasets.examples.tokens import FileRecords, StoreRecords, TokenizedExamples, check_first_records
from megatron.data.datasets.masked.files import MaskedFiles, TextFile
from megatron.data.datasets.masked.options import MaskedOptions
from megatron.data.datasets.masked.sentences import SentenceFile
from megatron.data.datasets.masked.texts import TextRows
from megatron.data.datasets.pairs import PackedPairs, TokenPairs, names_pairs, pair_prefixes
from megatron.data.datasets.parquet_rows import ParquetRows, check_window_length
from megatron.data.datasets.rows import RowSource
from megatron.data.datasets.sample import SourceDataset
from megatron.data.datasets.store_rows import DocumentEncoder, StoreRows, store_fingerprint
from megatron.data.formats.indexed import IndexedDataset, check_pair
from megatron.data.formats.windows import WindowFile, expand_windows, names_windows
from megatron.data.order.index_cache import IndexCache
from megatron.data.order.plan import SourcePlan
from megatron.data.stores.address import StoreAddress, is_store_address
from megatron.data.stores.document_store import open_store
from megatron.data.stores.record_store import PairStore, holds_pairs
from megatron.errors import ConfigError, DataError
from megatron.secret_text import masked
from megatron.tokenizers.record import check_same_tokenizer
from megatron.tokenizers.tokenizer import Tokenizer

_ADVICE = ", or preprocess the corpus again"

Source = IndexedDataset | RowSource | TokenPairs | TokenizedExamples | SentenceFile | TextFile


class DataSources:
    """The sources of a run by prefix, each opened once.

    Args:
        sequence_length: tokens of a sample, without the one that is only a label.
        layout: what `--data-impl` says of token files.
        tokenizer: of the run; without it no document store can be read, and windows are not checked to be of it.
        seed: of the run; pairs are shuffled by it before they are packed.
        cache: where the index arrays of a prefix are kept.
        options: how examples become rows.
        masked: how masked samples are made; None for other objectives.

    Raises:
        ConfigError: the tokenizer has no mask token; or on access, see the source's class.
        DataError, StorageError: on access, see the source's class.
    """

    def __init__(
        self,
        sequence_length: int,
        layout: str,
        tokenizer: Tokenizer | None,
        seed: int,
        cache: Callable[[str], IndexCache],
        options: ExampleOptions | None = None,
        masked: MaskedOptions | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self._layout = layout
        self._tokenizer = tokenizer
        self.seed = seed
        self._cache = cache
        self._options = options or ExampleOptions()
        self.masked: MaskedFiles | None = None
        if masked is not None:
            self.masked = MaskedFiles(masked, sequence_length, seed, tokenizer, cache)
        self._opened: dict[str, Source] = {}
        self._packed: dict[str, PackedPairs | ExampleRows | TextRows] = {}
        self._named: dict[str, str] = {}  # how the user wrote a prefix that is shown without its secret

    def packed(
        self, parts: TokenPairs | TokenizedExamples | TextFile, first: int, last: int, split: str
    ) -> PackedPairs | ExampleRows | TextRows:
        """The rows that the pairs, examples or documents [first, last) fill.

        Args:
            split: what they are for, in messages.
        """
        rows: PackedPairs | ExampleRows | TextRows
        if isinstance(parts, TextFile):
            rows = parts.rows(first, last)
            return self._packed.setdefault(rows.fingerprint, rows)
        if isinstance(parts, TokenPairs):
            padding_id = (self._tokenizer.eod_id if self._tokenizer else None) or 0
            cache = self._cache(parts.prefix)
            rows = PackedPairs(parts, first, last, self.sequence_length, self.seed, padding_id, cache)
            return self._packed.setdefault(rows.fingerprint, rows)
        pack, on_targets_only = self._options.pack, self._options.on_targets_only
        cache = self._cache(self._named[parts.prefix])
        rows = ExampleRows(
            parts, first, last, self.sequence_length, pack=pack, on_targets_only=on_targets_only, cache=cache
        )
        if rows.fingerprint not in self._packed:
            rows.report(split)
        return self._packed.setdefault(rows.fingerprint, rows)

    def with_copied_prompts(self, dataset: SourceDataset, source: SourcePlan, seed: int) -> SourceDataset:
        """The training samples of a source, some with prompts as answers if it holds examples and that is asked for."""
        rows, probability = self._packed.get(source.fingerprint), self._options.copy_prompt_probability
        if not probability or not isinstance(rows, ExampleRows):
            return dataset
        prefix = self._named[source.prefix]
        copies = rows.of(self._examples(prefix, copies_prompts=True), self._cache(prefix))
        return CopiedPrompts(dataset, copies, probability, seed)

    def map_rows(self, source: SourcePlan, samples: int, seed: int) -> int:
        """The samples that the map of a source of sentences has, see `MapRows`."""
        found = self[source.prefix]
        if not isinstance(found, SentenceFile):
            raise DataError(_other_rows_text(source.prefix))
        return len(found.table(source.first, source.last, samples, seed))

    def planned(self, source: SourcePlan) -> IndexedDataset | RowSource | SentenceFile:
        """What a source of a plan was made from.

        Raises:
            DataError: it was packed from pairs that the flags do not name now.
        """
        if source.fingerprint in self._packed:
            return self._packed[source.fingerprint]
        found = self[source.prefix]
        if isinstance(found, (TokenPairs, TokenizedExamples, TextFile)):
            raise DataError(_other_rows_text(source.prefix))
        return found

    def __getitem__(self, prefix: str) -> Source:
        if prefix not in self._opened:
            source = self._open(prefix)
            self._opened[prefix] = self._opened[source.prefix] = source
        return self._opened[prefix]

    def _open(self, prefix: str) -> Source:
        if names_examples(prefix):
            return self._examples(prefix)
        _check_examples(prefix, False, CAUSAL, self._options.needed_by)
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
        return indexed if self.masked is None else self.masked.open(indexed)

    def _examples(self, prefix: str, *, copies_prompts: bool = False) -> TokenizedExamples:
        if self._tokenizer is None:
            raise ConfigError("Examples are encoded while they are read, which needs a tokenizer (--tokenizer-type).")
        records = FileRecords(prefix) if names_example_files(prefix) else StoreRecords(prefix)
        found = TokenizedExamples(
            prefix,
            records,
            self._options.template,
            self._tokenizer,
            self._cache(prefix),
            copies_prompts=copies_prompts,
        )
        self._named[found.prefix] = prefix
        return found

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


def names_examples(prefix: str) -> bool:
    """Whether a source is examples: files by their suffix, a document store by its columns.

    Raises:
        ConfigError, DataError, StorageError: the store cannot be opened.
    """
    return holds_pairs(StoreAddress.of(prefix)) if is_store_address(prefix) else names_example_files(prefix)


def check_source(prefix: str, sequence_length: int | None, objective: str = CAUSAL, needed_by: str = "") -> None:
    """Checks that the files of a source exist, begin as their formats do and fit the objective, and the length of
    windows in their first file.

    Args:
        sequence_length: tokens of a sample; None if it is not known.
        needed_by: a flag that was given and is only for examples.

    Raises:
        ConfigError: windows have another length, an address cannot be read, pyarrow is missing, or the objective
            needs another kind of source.
        DataError: a file is missing, or the first record of a file of examples is bad.
    """
    _check_kind(prefix, objective)
    if is_store_address(prefix):
        address = StoreAddress.of(prefix)
        address.check_password()
        if address.kind == "sqlite" and not os.path.isfile(address.place):
            open_store(address)  # raises the error
        if address.kind == "sqlite":  # no server is asked before the run has its ranks
            _check_examples(prefix, holds_pairs(address), objective, needed_by)
        return
    _check_examples(prefix, names_examples(prefix), objective, needed_by)
    if names_examples(prefix):
        check_first_records(prefix)
    elif _is_windows(prefix):
        with WindowFile(expand_windows([prefix])[0]) as file:
            check_window_length(prefix, file.sequence_length, sequence_length or file.sequence_length)
    elif names_pairs(prefix):
        TokenPairs(prefix)
    else:
        check_pair(prefix)


@functools.lru_cache(maxsize=1024)
def source_facts(prefix: str) -> tuple[tuple[str, int | str], ...]:
    """Facts that identify the data of a prefix; cached, since every save asks for them and a run's data do not
    change.
    """
    if names_example_files(prefix):
        return ("files", len(example_files(prefix))), ("sha256", files_fingerprint(prefix))
    if is_store_address(prefix) and names_examples(prefix):
        pairs_of_store = PairStore(StoreAddress.of(prefix))
        return ("examples", len(pairs_of_store)), ("sha256", pairs_of_store.fingerprint())
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
    if names_example_files(prefix):
        return Path(example_files(prefix)[0]).parent
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
    is_token_file = not (is_store_address(prefix) or names_example_files(prefix) or is_pairs or _is_windows(prefix))
    if objective == MASKED and not is_token_file:
        raise ConfigError(
            f"{masked(prefix)} is no token file, and --objective {MASKED} trains on token files only. Preprocess the "
            "text with tools/preprocess_data.py, and give --data-path PREFIX."
        )
    if objective == MULTITASK and not is_pairs:
        raise DataError(
            f"--objective {MULTITASK} trains on pairs of inputs and targets, and there is no {prefix}_inputs_document"
            f".idx beside a {prefix}_targets_document.idx. Make both with tools/preprocess_data.py --json-keys inputs "
            "targets --output-prefix PREFIX, and give --data-path PREFIX."
        )


def _check_examples(prefix: str, is_examples: bool, objective: str, needed_by: str) -> None:
    """Checks that examples are trained on causally, and that flags for them are given with them only.

    Raises:
        ConfigError: it is not so.
    """
    if is_examples and objective == PREFIX:
        raise ConfigError(
            f"{prefix} holds examples with answers, which --objective {PREFIX} does not train on: its prefixes are "
            f"random. Drop the objective, or use --objective {MULTITASK} with inputs and targets as token files."
        )
    if needed_by and not is_examples:
        raise ConfigError(
            f"{needed_by} is for examples with answers (chat.jsonl), which {masked(prefix)} does not hold. Drop the "
            "flag, or give --data-path examples only."
        )


def _other_rows_text(prefix: str) -> str:
    return (
        f"The order of samples was planned with other ranges of {prefix} than the flags name now, or its rows were "
        "filled in another way. Use the same files, ranges and flags."
    )


def _is_windows(prefix: str) -> bool:
    """Whether a prefix that names no store means Parquet files; a pattern is never a pair of token files."""
    return names_windows(prefix) or (glob.has_magic(prefix) and not os.path.exists(f"{prefix}.idx"))
