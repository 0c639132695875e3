"""Samples from sources whose rows are samples already: windows in Parquet files, documents of a store.

A token file is one stream that is cut into samples; a row source has a row for each sample, which may be padded, so it
says which labels count. Everything else (splits, blends, plan, resume) treats both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megatron.data.datasets.sample import DocumentSpan, Sample, SegmentedSamples
from megatron.data.order.index_map import check_seed
from megatron.data.order.plan import Segment
from megatron.data.order.row_order import EpochRowOrder, RowSource


@dataclass
class _Chunk:
    """The stretch of the order that is being read.

    Args:
        key: segment, epoch, and number of the chunk in it.
        rows: in their order.
    """

    key: tuple[int, int, int]
    source: RowSource
    rows: np.ndarray

    @cached_property
    def content(self) -> tuple[np.ndarray, ...]:
        return self.source.read(self.rows)


class RowDataset(SegmentedSamples):
    """The rows [first, last) of a source in planned order: segments of whole epochs, each epoch shuffled separately.

    Args:
        segments: as planned; each holds whole epochs.

    Raises:
        DataError: a seed that NumPy cannot take.
    """

    def __init__(self, source: RowSource, first: int, last: int, segments: Sequence[Segment]) -> None:
        for segment in segments:
            check_seed(segment.seed)
        self.source = source
        self._edges = source.blocks(first, last)
        self._rows = last - first
        self._segments = tuple(segments)
        super().__init__(source.prefix, (segment.rows for segment in segments))
        self._order: tuple[tuple[int, int], EpochRowOrder] | None = None
        self._chunk: _Chunk | None = None

    def read(self, sample: int) -> Sample:
        """A sample and which of its labels count.

        Raises:
            IndexError: there is no such sample.
            DataError: the row is damaged.
        """
        chunk, place = self._place(sample)
        if self.source.reads_chunks:
            tokens, *masks = (part[place] for part in chunk.content)
        else:
            tokens, *masks = (part[0] for part in self.source.read(chunk.rows[place : place + 1]))
        return Sample(tokens.astype(np.int64), *masks)

    def locate(self, sample: int, position: int) -> str:
        chunk, place = self._place(sample)
        return self.source.locate(int(chunk.rows[place]), position)

    def spans(self, sample: int) -> list[DocumentSpan]:
        chunk, place = self._place(sample)
        return [DocumentSpan(int(chunk.rows[place]), 0, len(self.read(sample).tokens))]

    def _place(self, sample: int) -> tuple[_Chunk, int]:
        """The chunk that contains a sample, and its place there."""
        segment, number = self._segment_of(sample)
        epoch, position = divmod(number, self._rows)
        if self._order is None or self._order[0] != (segment, epoch):
            order = EpochRowOrder(self._edges, self.source.chunk_rows, self._segments[segment].seed, epoch)
            self._order = (segment, epoch), order
        number, place = self._order[1].place(position)
        if self._chunk is None or self._chunk.key != (segment, epoch, number):
            self._chunk = None  # freed before the next one is read
            self._chunk = _Chunk((segment, epoch, number), self.source, self._order[1].chunk(number))
        return self._chunk, place
