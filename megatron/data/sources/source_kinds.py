"""The kinds of data sources. A new one is a class here, or in a separate file, with a line in `open_source`.

Rarely used kinds, such as databases, are imported on demand.
"""

from __future__ import annotations

import functools
import glob
import os
from abc import abstractmethod
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np

from megatron.config import DataConfig
from megatron.config.flags.blends import MOCK_DATA
from megatron.config.objective.masking import SENTENCES
from megatron.data.datasets.changed_samples import CopiedPrompts
from megatron.data.datasets.examples.example_files import example_files, files_fingerprint, names_example_files
from megatron.data.datasets.examples.example_rows import ExampleRows
from megatron.data.datasets.examples.tokenized_examples import RecordSource, TokenizedExamples, check_first_records
from megatron.data.datasets.gpt import GPTDataset
from megatron.data.datasets.row_dataset import RowDataset
from megatron.data.datasets.sample import SampleDataset
from megatron.data.formats.indexed import IndexedDataset, check_pair
from megatron.data.formats.store_names import is_store_address
from megatron.data.formats.window_names import names_windows
from megatron.data.order.index_cache import description_sha256
from megatron.data.order.index_map import Indices, build_indices
from megatron.data.order.plan import DataPlan, GroupPlan, Segment, SourcePlan
from megatron.data.order.row_order import RowSource
from megatron.data.sources.pairs import PackedPairs, TokenPairs, names_pairs, pair_prefixes
from megatron.data.sources.source import DataRequest, Facts, Source, changed_rows_error
from megatron.errors import DataError

RANDOM_ROWS = 100_000  # as many as Megatron-LM's MockGPTLowLevelDataset has documents
_EMPTY_REQUEST = DataRequest(DataConfig(seq_length=1), 1, 0)


def open_source(prefix: str, request: DataRequest = _EMPTY_REQUEST) -> Source:
    """Returns the source of a prefix."""
    if prefix == MOCK_DATA:
        return _RandomSource(prefix, request)
    if is_store_address(prefix):
        return _imported("megatron.data.stores.store_source", "StoreSource", prefix, request)
    if names_example_files(prefix):
        return ExampleSource(prefix, request)
    if names_windows(prefix) or (glob.has_magic(prefix) and not os.path.exists(f"{prefix}.idx")):
        # a pattern is never a pair of token files
        return _imported("megatron.data.sources.parquet_rows", "WindowSource", prefix, request)
    if names_pairs(prefix):
        return _PairSource(prefix, request)
    if request.masked is None:
        return TokenSource(prefix, request)
    kind = "SentenceSource" if request.masked.masking.masked_samples == SENTENCES else "TextSource"
    return _imported("megatron.data.sources.masked_sources", kind, prefix, request)


def _imported(module: str, name: str, prefix: str, request: DataRequest) -> Source:
    source: Source = getattr(import_module(module), name)(prefix, request)
    return source


@functools.lru_cache(maxsize=1024)
def source_facts(prefix: str) -> Facts:
    """Returns the facts that identify the data of a prefix; cached, since every save needs them."""
    return open_source(prefix).facts()


class TokenSource(Source):
    """A token file: one stream of tokens that is cut into samples."""

    is_token_file = True

    def _check_files(self, sequence_length: int | None) -> None:
        check_pair(self.prefix)

    def facts(self) -> Facts:
        return (
            ("sequences", len(self._indexed)),
            ("tokens", self._indexed.tokens),
            ("dtype", self._indexed.dtype.name),
            ("sha256", self._indexed.fingerprint),
        )

    def __len__(self) -> int:
        return len(self._indexed)

    def plan(self, first: int, last: int, split: str) -> SourcePlan:
        tokens = int(self._indexed.lengths[first:last].sum(dtype=np.int64))
        return SourcePlan(self.prefix, self._indexed.fingerprint, first, last, tokens)

    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        segments = [self._segment(planned, segment, plan) for segment in planned.segments]
        return GPTDataset(self._indexed, plan.sequence_length, segments)

    @cached_property
    def _indexed(self) -> IndexedDataset:
        indexed = IndexedDataset(self.prefix)
        _check_layout(indexed, self._request.data.data_impl)
        return indexed

    def _segment(self, source: SourcePlan, segment: Segment, plan: DataPlan) -> Indices:
        """Returns the index arrays of a segment, from the cache if possible."""
        description = {
            "idx_sha256": source.fingerprint,
            "first": source.first,
            "last": source.last,
            "sequence_length": plan.sequence_length,
            "samples": segment.samples,
            "seed": segment.seed,
            "epoch_rule": plan.epoch_rule,
        }

        def make() -> dict[str, np.ndarray]:
            lengths, length, samples, seed = self._indexed.lengths, plan.sequence_length, segment.samples, segment.seed
            wide = source.last > np.iinfo(np.int32).max
            documents = np.arange(source.first, source.last, dtype=np.int64 if wide else np.int32)
            return build_indices(lengths, documents, length, samples, seed, plan.epoch_rule, source.tokens)._asdict()

        arrays = self.cache.arrays("gpt", description, make)
        return Indices(arrays["document"], arrays["sample"], arrays["shuffle"])


class RowsSource(Source):
    """A source with one row per sample."""

    def __len__(self) -> int:
        return len(self._rows)

    def plan(self, first: int, last: int, split: str) -> SourcePlan:
        tokens = (last - first) * self._request.sequence_length
        return SourcePlan(self._rows.prefix, self._rows.fingerprint, first, last, tokens, is_rows=True)

    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        return RowDataset(self._rows, planned.first, planned.last, planned.segments)

    @cached_property
    @abstractmethod
    def _rows(self) -> RowSource: ...


class RandomRows(RowSource):
    """Rows of random ids that depend on the seed and the row's index alone, so no layout or resume changes them."""

    def __init__(self, prefix: str, vocab_size: int, sequence_length: int, seed: int) -> None:
        self.prefix = prefix
        self._vocab_size, self._length, self._seed = vocab_size, sequence_length + 1, seed
        self.fingerprint = description_sha256({"ids": vocab_size, "length": sequence_length, "seed": seed})

    def __len__(self) -> int:
        return RANDOM_ROWS

    def read(self, rows: np.ndarray) -> tuple[np.ndarray]:
        # Unlike default_rng, RandomState draws the same in every version of NumPy.
        drawn = (np.random.RandomState([self._seed, row]) for row in rows.tolist())
        return (np.stack([each.randint(self._vocab_size, size=self._length, dtype=np.int64) for each in drawn]),)

    def locate(self, row: int, position: int) -> str:
        return f"{self.prefix} token {position} of random row {row}"


class _RandomSource(RowsSource):
    """Random ids of the run's tokenizer, instead of data."""

    def _check_files(self, sequence_length: int | None) -> None:
        pass

    def facts(self) -> Facts:
        return (("random_rows", RANDOM_ROWS),)

    @cached_property
    def _rows(self) -> RowSource:
        request, tokenizer = self._request, self._request.tokenizer_for("--mock-data draws ids of")
        return RandomRows(self.prefix, tokenizer.vocab_size, request.sequence_length, request.seed)


_Rows = TypeVar("_Rows", bound=RowSource)


class PackedSource(Source, Generic[_Rows]):
    """A source that is packed into rows; the rows depend on the range."""

    def __init__(self, prefix: str, request: DataRequest) -> None:
        super().__init__(prefix, request)
        self._packed: dict[str, _Rows] = {}

    def plan(self, first: int, last: int, split: str) -> SourcePlan:
        rows = self._pack(first, last)
        if rows.fingerprint not in self._packed:
            self._report(rows, split)
        self._packed.setdefault(rows.fingerprint, rows)
        tokens = len(rows) * self._request.sequence_length
        return SourcePlan(rows.prefix, rows.fingerprint, 0, len(rows), tokens, is_rows=True)

    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        return RowDataset(self._planned_rows(planned), planned.first, planned.last, planned.segments)

    def _planned_rows(self, planned: SourcePlan) -> _Rows:
        if planned.fingerprint not in self._packed:
            raise changed_rows_error(planned.prefix)
        return self._packed[planned.fingerprint]

    @abstractmethod
    def _pack(self, first: int, last: int) -> _Rows: ...

    def _report(self, rows: _Rows, split: str) -> None:
        """Logs the packing of new rows."""


class _PairSource(PackedSource[PackedPairs]):
    """Inputs and targets in two token files."""

    is_pairs = True

    def _check_files(self, sequence_length: int | None) -> None:
        TokenPairs(self.prefix)

    def facts(self) -> Facts:
        tokens = self._pairs.inputs.tokens + self._pairs.targets.tokens
        return ("pairs", len(self._pairs)), ("tokens", tokens), ("sha256", self._pairs.fingerprint)

    @property
    def token_files(self) -> tuple[str, ...]:
        return pair_prefixes(self.prefix)

    def __len__(self) -> int:
        return len(self._pairs)

    @cached_property
    def _pairs(self) -> TokenPairs:
        pairs = TokenPairs(self.prefix)
        _check_layout(pairs.inputs, self._request.data.data_impl)
        _check_layout(pairs.targets, self._request.data.data_impl)
        return pairs

    def _pack(self, first: int, last: int) -> PackedPairs:
        request = self._request
        padding_id = (request.tokenizer.eod_id if request.tokenizer else None) or 0
        return PackedPairs(self._pairs, first, last, request.sequence_length, request.seed, padding_id, self.cache)


class ExampleSource(PackedSource[ExampleRows]):
    """Examples with answers, by default in files."""

    holds_examples = True

    def _check_files(self, sequence_length: int | None) -> None:
        check_first_records(self.prefix)

    def facts(self) -> Facts:
        return ("files", len(example_files(self.prefix))), ("sha256", files_fingerprint(self.prefix))

    @property
    def folder(self) -> Path:
        return Path(example_files(self.prefix)[0]).parent

    def __len__(self) -> int:
        return len(self._examples)

    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        """Returns the dataset of a plan; in training, some prompts may replace answers (`CopiedPrompts`)."""
        dataset, probability = super().dataset(planned, group, plan), self._request.examples.copy_prompt_probability
        if not probability or group is not plan.train:
            return dataset
        copies = self._planned_rows(planned).of(self._tokenized(copies_prompts=True), self.cache)
        return CopiedPrompts(dataset, copies, probability, plan.seed)

    @cached_property
    def _examples(self) -> TokenizedExamples:
        return self._tokenized()

    def _tokenized(self, *, copies_prompts: bool = False) -> TokenizedExamples:
        request, prefix = self._request, self.prefix
        tokenizer = request.tokenizer_for("Examples are encoded at the start, which requires")
        template = request.examples.template
        return TokenizedExamples(
            prefix, self._records(), template, tokenizer, self.cache, copies_prompts=copies_prompts
        )

    def _records(self) -> RecordSource:
        return RecordSource.of_files(self.prefix)

    def _pack(self, first: int, last: int) -> ExampleRows:
        pack, on_targets_only = self._request.examples.pack, self._request.examples.on_targets_only
        length = self._request.sequence_length
        return ExampleRows(
            self._examples, first, last, length, pack=pack, on_targets_only=on_targets_only, cache=self.cache
        )

    def _report(self, rows: ExampleRows, split: str) -> None:
        rows.report(split)


def _check_layout(indexed: IndexedDataset, data_impl: str) -> None:
    """Checks that a token file has the layout set by `--data-impl`; cached and lazy are the same.

    Raises:
        DataError: the layout differs.
    """
    expected = {"mmap": "mmap", "cached": "cached", "lazy": "cached"}.get(data_impl, indexed.layout)
    if indexed.layout != expected:
        names = {"mmap": "mmap", "cached": "cached or lazy"}
        raise DataError(
            f"--data-impl {data_impl} was given, but {indexed.idx_path} has the layout {names[indexed.layout]}. Remove "
            f"--data-impl (the layout is then read from the file) or use --data-impl {names[indexed.layout]}."
        )
