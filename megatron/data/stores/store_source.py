"""A document store as a source of training data."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from megatron.data.datasets.examples.tokenized_examples import RecordLocation, RecordSource
from megatron.data.datasets.sample import SampleDataset
from megatron.data.order.plan import DataPlan, GroupPlan, SourcePlan
from megatron.data.order.row_order import RowSource
from megatron.data.sources.source import DataRequest, Facts, SourceUse, check_examples
from megatron.data.sources.source_kinds import ExampleSource, RowsSource
from megatron.data.stores.address import StoreAddress
from megatron.data.stores.document_store import open_store
from megatron.data.stores.record_store import PairStore, holds_pairs
from megatron.data.stores.store_rows import DocumentEncoder, StoreRows, store_fingerprint
from megatron.secret_text import masked


class StoreSource(RowsSource):
    """A document store: its documents are rows, or examples if it has columns of prompts and answers."""

    def check(self, use: SourceUse) -> None:
        self._check_objective(use.objective)
        self._check_files(use.sequence_length)
        if self._address.kind == "sqlite":  # no server is contacted before the ranks have started
            check_examples(self.prefix, self.holds_examples, use)

    def _check_files(self, sequence_length: int | None) -> None:
        self._address.check_password()
        if self._address.kind == "sqlite" and not os.path.isfile(self._address.target):
            open_store(self._address)  # raises the error

    def facts(self) -> Facts:
        if self.holds_examples:
            pairs = PairStore(self._address)
            return ("examples", len(pairs)), ("sha256", pairs.fingerprint())
        store = open_store(self.prefix)
        return ("documents", len(store)), ("sha256", store_fingerprint(store))

    @property
    def folder(self) -> Path:
        return Path(self._address.target).parent if self._address.kind == "sqlite" else Path()

    @property
    def holds_examples(self) -> bool:  # type: ignore[override]
        return holds_pairs(self._address)

    def __len__(self) -> int:
        return len(self._rows if self._examples is None else self._examples)

    def plan(self, first: int, last: int, split: str) -> SourcePlan:
        if self._examples is not None:
            return self._examples.plan(first, last, split)
        return super().plan(first, last, split)

    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        if self._examples is not None:
            return self._examples.dataset(planned, group, plan)
        return super().dataset(planned, group, plan)

    @property
    def _address(self) -> StoreAddress:
        return StoreAddress.of(self.prefix)

    @cached_property
    def _examples(self) -> _StoredExamples | None:
        return _StoredExamples(self, self._request) if self.holds_examples else None

    @cached_property
    def _rows(self) -> RowSource:
        request = self._request
        tokenizer = request.tokenizer_for("A document store is encoded on the fly, which requires")
        return StoreRows(self.prefix, DocumentEncoder(tokenizer, request.sequence_length, request.encoding))


class _StoredExamples(ExampleSource):
    """The documents of a store as examples."""

    def __init__(self, store: StoreSource, request: DataRequest) -> None:
        super().__init__(store.prefix, request)
        self._folder = store.folder

    @property
    def folder(self) -> Path:
        return self._folder

    def _records(self) -> RecordSource:
        return stored_records(self.prefix)


def stored_records(address: str) -> RecordSource:
    """Returns the pairs of a store, each with the index of its document."""
    store = PairStore(StoreAddress.of(address))

    def records() -> Iterator[tuple[RecordLocation, Any]]:
        return ((RecordLocation(0, number), record) for number, record in enumerate(store.records()))

    return RecordSource((masked(address),), store.fingerprint, records)
