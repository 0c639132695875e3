"""Token files as sources of masked samples."""

from __future__ import annotations

from functools import cached_property
from typing import cast

import numpy as np

from megatron.config.objective.masking import STREAM
from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.masked.sentences import SentenceDataset, SentenceFile
from megatron.data.datasets.masked.texts import MaskedRows, TextRows
from megatron.data.datasets.sample import SampleDataset
from megatron.data.order.plan import DataPlan, GroupPlan, SourcePlan
from megatron.data.sources.source import DataRequest
from megatron.data.sources.source_kinds import PackedSource, TokenSource
from megatron.errors import DataError


class _MaskedSource(TokenSource):
    """A token file as a source of masked samples."""

    def __init__(self, prefix: str, request: DataRequest) -> None:
        super().__init__(prefix, request)
        self._options = cast(MaskedOptions, request.masked)
        self._vocabulary = request.masked_vocabulary
        self._options.predictions(request.sequence_length)


class SentenceSource(_MaskedSource):
    """A token file whose sequences are sentences, for masked samples of sentence pairs; split by documents."""

    def __len__(self) -> int:
        return len(self._file)

    def plan(self, first: int, last: int, split: str) -> SourcePlan:
        request = self._request
        tokens = len(self._file.table(first, last, 1, request.seed)) * request.sequence_length
        return SourcePlan(self.prefix, self._file.fingerprint, first, last, tokens, is_mapped=True)

    def map_rows(self, planned: SourcePlan, samples: int, seed: int) -> int:
        return len(self._file.table(planned.first, planned.last, samples, seed))

    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        return SentenceDataset(self._file, planned.first, planned.last, planned.segments)

    @cached_property
    def _file(self) -> SentenceFile:
        indexed = self._indexed
        if self._options.pairs and int(np.diff(indexed.documents).max(initial=0)) < 2:
            raise DataError(
                f"{indexed.prefix} has no document of two sentences, so it yields no sentence pairs. If it is not "
                "split into sentences, preprocess it with --split-sentences and use the files that end in _sentence; "
                "otherwise use --bert-no-binary-head, or --masked-samples stream."
            )
        return SentenceFile(indexed, self._request.sequence_length, self._options, self._vocabulary, self.cache)


class TextSource(PackedSource[TextRows], _MaskedSource):
    """A token file as plain text for masked samples, regardless of its sequences; split by documents."""

    def __len__(self) -> int:
        return len(self._indexed.documents) - 1

    def dataset(self, planned: SourcePlan, group: GroupPlan, plan: DataPlan) -> SampleDataset:
        rows, request = super().dataset(planned, group, plan), self._request
        return MaskedRows(rows, request.seed, request.sequence_length, self._options, self._vocabulary)

    def _pack(self, first: int, last: int) -> TextRows:
        runs_on = self._options.masking.masked_samples == STREAM
        make = TextRows.of_stream if runs_on else TextRows.of_documents
        return make(self._indexed, first, last, self._request.sequence_length, self._vocabulary)
