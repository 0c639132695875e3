"""What a dataset returns for an index: the tokens of one sample and, where not all of its labels count, a mask."""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate
from typing import NamedTuple

import numpy as np


class Sample(NamedTuple):
    """One sample.

    Shapes:
        tokens: int64 [s + 1], the inputs and, shifted by one, the labels; where a sample has labels of its own only the
            inputs, int64 [s].
        loss_mask: bool or float32 [s], the weight of each label; None if all count fully.
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
    """A stretch of tokens of one document within a sample.

    Args:
        sequence: its number in the source, of a row source the number of the row.
        first: number of its first token in that sequence.
        tokens: how many of them.
    """

    sequence: int
    first: int
    tokens: int


class SampleDataset(ABC):
    """Samples by number."""

    @property
    def prefix(self) -> str:
        """The source as the user named it; empty for several together."""
        return ""

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1], or [s] where samples have labels of their own."""
        return self.read(sample).tokens

    @abstractmethod
    def read(self, sample: int) -> Sample:
        """Token ids, and which of them count as labels."""

    def source_of(self, sample: int) -> int:
        """The source of its group (`GroupPlan.sources`) that a sample comes from; 0 if there is only one."""
        return 0

    @abstractmethod
    def locate(self, sample: int, position: int) -> str:
        """Describes where a token of a sample is stored."""

    @abstractmethod
    def spans(self, sample: int) -> list[DocumentSpan]:
        """The stretches of documents that make up a sample, in the order of its tokens."""


class SegmentedSamples(SampleDataset):
    """The samples of one source in planned order: segments that follow each other.

    Args:
        rows: samples of each segment.
    """

    def __init__(self, prefix: str, rows: Iterable[int]) -> None:
        self._prefix = prefix
        self._starts = [0, *accumulate(rows)]

    @property
    def prefix(self) -> str:
        return self._prefix

    def __len__(self) -> int:
        return self._starts[-1]

    def _segment_of(self, sample: int) -> tuple[int, int]:
        """The segment of a sample, and its number there."""
        if not 0 <= sample < len(self):
            raise IndexError(f"{self.prefix} has {len(self)} planned samples; there is no sample {sample}.")
        segment = bisect_right(self._starts, sample) - 1
        return segment, sample - self._starts[segment]


class SampleRoute(SampleDataset):
    """Samples that each belong to one of several datasets; a subclass says to which."""

    @abstractmethod
    def _place(self, sample: int) -> tuple[SampleDataset, int]:
        """The dataset of a sample, and its number there."""

    def read(self, sample: int) -> Sample:
        dataset, number = self._place(sample)
        return dataset.read(number)

    def source_of(self, sample: int) -> int:
        dataset, number = self._place(sample)
        return dataset.source_of(number)

    def locate(self, sample: int, position: int) -> str:
        dataset, number = self._place(sample)
        return dataset.locate(number, position)

    def spans(self, sample: int) -> list[DocumentSpan]:
        dataset, number = self._place(sample)
        return dataset.spans(number)


class ChangedSamples(SampleRoute):
    """The samples of one other dataset, each changed when it is read."""

    dataset: SampleDataset

    @property
    def prefix(self) -> str:
        return self.dataset.prefix

    def __len__(self) -> int:
        return len(self.dataset)

    def _place(self, sample: int) -> tuple[SampleDataset, int]:
        return self.dataset, sample
