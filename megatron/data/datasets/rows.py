"""Samples from sources whose rows are samples already: windows in Parquet files, documents of a store.

A token file is one stream that is cut into samples; a row source has a row for each sample, which may be padded, so it
says which labels count. Everything else (splits, blends, plan, resume) treats both alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np

from megatron.data.datasets.sample import DocumentSpan, Sample, SegmentedSamples
from megatron.data.order.index_map import check_seed
from megatron.data.order.plan import Segment
from megatron.data.order.row_order import EpochRowOrder


class RowSource(Protocol):
    """Rows by number, each a sample."""

    @property
    def prefix(self) -> str:
        """The source as the user named it."""

    @property
    def fingerprint(self) -> str:
        """Hash that changes with the rows or their order, wherever they are stored."""

    @property
    def chunk_rows(self) -> int:
        """About this many rows are shuffled together; part of the order, as the blocks are."""

    @property
    def reads_chunks(self) -> bool:
        """Whether reading a chunk of the order at once is cheaper than reading its rows one by one."""

    def __len__(self) -> int: ...

    def blocks(self, first: int, last: int) -> np.ndarray:
        """Cuts the rows [first, last) into stretches that are cheap to read together.

        Shapes:
            result: int64 [blocks + 1], the first row of each, then `last`.
        """

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Reads rows: the fields of `Sample` in their order, each for all rows; trailing ones may be left out.

        Shapes:
            rows: int64 [n]; result: token ids [n, s + 1] of any integer type, bool [n, s], whether each label counts,
            and so on.
        """

    def locate(self, row: int, position: int) -> str:
        """Describes where a token of a row is stored."""


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
        """Tokens and masks of all its rows."""
        return self.source.read(self.rows)


class RowDataset(SegmentedSamples):
    """The rows [first, last) of a source in planned order: segments of whole epochs, each epoch shuffled anew.

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

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1] of a sample."""
        return self.read(sample).tokens

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
        """Describes where a token of a sample is stored."""
        chunk, place = self._place(sample)
        return self.source.locate(int(chunk.rows[place]), position)

    def spans(self, sample: int) -> list[DocumentSpan]:
        """The one row that is the sample."""
        chunk, place = self._place(sample)
        return [DocumentSpan(int(chunk.rows[place]), 0, len(self.read(sample).tokens))]

    def _place(self, sample: int) -> tuple[_Chunk, int]:
        """The chunk that a sample lies in, and its place there."""
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
