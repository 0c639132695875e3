"""What a data set returns for a number: the tokens of one sample and, where not all of its labels count, a mask."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np


class Sample(NamedTuple):
    """One sample.

    Shapes:
        tokens: int64 [s + 1], the inputs and, one further, the labels; where a sample has labels of its own only the
            inputs, int64 [s].
        loss_mask: bool or float32 [s], for each label how much it counts; None if all count fully.
        segment_ids: int64 [s], which of the packed examples each input belongs to, counted from 0; None where
            documents end with end-of-document, or are not separated at all.
        prefix_mask: bool [s], whether all tokens of its segment may attend to an input, those before it included;
            None where tokens attend to earlier ones only.
        labels: int64 [s], the token to be predicted at each place; None if it is the next one.
        token_types: int64 [s], which part of the sample each input belongs to (`--num-token-types`); None if there is
            only one.

    Args:
        is_swapped: whether the two parts of the sample are in the wrong order; None if it has no such parts.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None = None
    segment_ids: np.ndarray | None = None
    prefix_mask: np.ndarray | None = None
    labels: np.ndarray | None = None
    token_types: np.ndarray | None = None
    is_swapped: bool | None = None


class DocumentSpan(NamedTuple):
    """A stretch of tokens of one document that lies in a sample.

    Args:
        sequence: its number in the source, of a row source the number of the row.
        first: number of its first token in that sequence.
        tokens: how many of them.
    """

    sequence: int
    first: int
    tokens: int


class SampleDataset(Protocol):
    """Samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1], or [s] where samples have labels of their own."""

    def read(self, sample: int) -> Sample:
        """Token ids, and which of them count as labels."""

    def source_of(self, sample: int) -> int:
        """Which source of its group (`GroupPlan.sources`) a sample comes from."""

    def locate(self, sample: int, position: int) -> str:
        """Describes where a token of a sample is stored."""

    def spans(self, sample: int) -> list[DocumentSpan]:
        """The stretches of documents that make up a sample, in the order of its tokens."""


class SourceDataset(SampleDataset, Protocol):
    """The samples of one source."""

    @property
    def prefix(self) -> str:
        """The source as the user named it."""


class SegmentedSamples:
    """The samples of one source in planned order: segments that follow each other.

    Args:
        prefix: the source as the user named it.
        rows: samples of each segment.
    """

    def __init__(self, prefix: str, rows: Iterable[int]) -> None:
        self.prefix = prefix
        self._starts = [0, *accumulate(rows)]

    def __len__(self) -> int:
        return self._starts[-1]

    def source_of(self, sample: int) -> int:
        """Which source of its group a sample comes from: there is only this one."""
        return 0

    def _segment_of(self, sample: int) -> tuple[int, int]:
        """The segment of a sample, and its number there."""
        if not 0 <= sample < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} planned samples; there is no sample {sample}.")
        segment = bisect_right(self._starts, sample) - 1
        return segment, sample - self._starts[segment]


class SampleRoute:
    """Samples that each belong to one of other data sets; a subclass says to which."""

    def _place(self, sample: int) -> tuple[SampleDataset, int]:
        """The data set of a sample, and its number there."""
        raise NotImplementedError

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids of a sample, as in its data set."""
        return self.read(sample).tokens

    def read(self, sample: int) -> Sample:
        """Token ids, and which of them count as labels."""
        dataset, number = self._place(sample)
        return dataset.read(number)

    def source_of(self, sample: int) -> int:
        """Which source of its group a sample comes from."""
        dataset, number = self._place(sample)
        return dataset.source_of(number)

    def locate(self, sample: int, position: int) -> str:
        """Describes where a token of a sample is stored."""
        dataset, number = self._place(sample)
        return dataset.locate(number, position)

    def spans(self, sample: int) -> list[DocumentSpan]:
        """The stretches of documents that make up a sample, in the order of its tokens."""
        dataset, number = self._place(sample)
        return dataset.spans(number)
