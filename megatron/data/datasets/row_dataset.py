"""Samples from sources with one row per sample: windows in Parquet files, documents of a store.

A token file is one stream that is cut into samples; a row may be padded, so a row source provides loss masks. Splits,
blends, plans and resuming treat both alike.
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
    """The chunk of the order that is being read.

    Args:
        key: segment, epoch, and index of the chunk in it.
        rows: row indices in order.
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
        DataError: a seed that NumPy rejects.
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
        """Returns a sample with its loss mask.

        Raises:
            IndexError: the sample is out of range.
            DataError: the row is damaged.
        """
        chunk, offset = self._locate_chunk(sample)
        if self.source.reads_chunks:
            tokens, *masks = (field[offset] for field in chunk.content)
        else:
            tokens, *masks = (field[0] for field in self.source.read(chunk.rows[offset : offset + 1]))
        return Sample(tokens.astype(np.int64), *masks)

    def locate(self, sample: int, position: int) -> str:
        chunk, offset = self._locate_chunk(sample)
        return self.source.locate(int(chunk.rows[offset]), position)

    def spans(self, sample: int) -> list[DocumentSpan]:
        chunk, offset = self._locate_chunk(sample)
        return [DocumentSpan(int(chunk.rows[offset]), 0, len(self.read(sample).tokens))]

    def _locate_chunk(self, sample: int) -> tuple[_Chunk, int]:
        """Returns the chunk that contains a sample, and the sample's offset in it."""
        segment, number = self._segment_of(sample)
        epoch, position = divmod(number, self._rows)
        if self._order is None or self._order[0] != (segment, epoch):
            order = EpochRowOrder(self._edges, self.source.chunk_rows, self._segments[segment].seed, epoch)
            self._order = (segment, epoch), order
        number, offset = self._order[1].chunk_of(position)
        if self._chunk is None or self._chunk.key != (segment, epoch, number):
            self._chunk = None  # freed before the next one is read
            self._chunk = _Chunk((segment, epoch, number), self.source, self._order[1].chunk(number))
        return self._chunk, offset
