"""A sample, and the interface and base classes of datasets, which map an index to a sample."""

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
        tokens: int64 [s + 1], the inputs and, shifted by one, the labels; int64 [s], only the inputs, if `labels` is
            given.
        loss_mask: bool or float32 [s], the weight of each label; None if all weights are 1.
        segment_ids: int64 [s], index of the packed example that each input belongs to; None where documents end with
            end-of-document, or are not separated.
        prefix_mask: bool [s], true for inputs that all tokens of their segment, earlier ones included, may attend to;
            None where tokens attend to earlier ones only.
        labels: int64 [s], the token to predict at each position; None if it is the next one.
        token_types: int64 [s], index of the part that each input belongs to (`--num-token-types`); None for a single
            part.

    Args:
        is_swapped: the two parts of the sample are in the wrong order; None if it has no such parts.
    """

    tokens: np.ndarray
    loss_mask: np.ndarray | None = None
    segment_ids: np.ndarray | None = None
    prefix_mask: np.ndarray | None = None
    labels: np.ndarray | None = None
    token_types: np.ndarray | None = None
    is_swapped: bool | None = None


class DocumentSpan(NamedTuple):
    """Consecutive tokens of one document within a sample.

    Args:
        sequence: index of the sequence, or row, in the source.
        first: offset of the first token in that sequence.
        tokens: number of tokens.
    """

    sequence: int
    first: int
    tokens: int


class SampleDataset(ABC):
    """Samples by index."""

    @property
    def prefix(self) -> str:
        """The source as named by the user; empty for several sources."""
        return ""

    @abstractmethod
    def __len__(self) -> int: ...

    def __getitem__(self, sample: int) -> np.ndarray:
        """Returns token ids, int64 [s + 1], or [s] where samples have separate labels."""
        return self.read(sample).tokens

    @abstractmethod
    def read(self, sample: int) -> Sample:
        """Returns a sample with its labels and masks."""

    def source_of(self, sample: int) -> int:
        """Returns the index of a sample's source in its group (`GroupPlan.sources`); 0 for a single source."""
        return 0

    @abstractmethod
    def locate(self, sample: int, position: int) -> str:
        """Describes the location of a token of a sample."""

    @abstractmethod
    def spans(self, sample: int) -> list[DocumentSpan]:
        """Returns the document spans that make up a sample, in order."""


class SegmentedSamples(SampleDataset):
    """The samples of one source in planned order: consecutive segments.

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
        """Returns the segment of a sample, and its index there."""
        if not 0 <= sample < len(self):
            raise IndexError(f"Sample {sample} is out of range: {len(self)} samples of {self.prefix} are planned.")
        segment = bisect_right(self._starts, sample) - 1
        return segment, sample - self._starts[segment]


class SampleRoute(SampleDataset):
    """Samples that each belong to one of several datasets, which a subclass picks."""

    @abstractmethod
    def _route(self, sample: int) -> tuple[SampleDataset, int]:
        """Returns the dataset of a sample, and its index there."""

    def read(self, sample: int) -> Sample:
        dataset, number = self._route(sample)
        return dataset.read(number)

    def source_of(self, sample: int) -> int:
        dataset, number = self._route(sample)
        return dataset.source_of(number)

    def locate(self, sample: int, position: int) -> str:
        dataset, number = self._route(sample)
        return dataset.locate(number, position)

    def spans(self, sample: int) -> list[DocumentSpan]:
        dataset, number = self._route(sample)
        return dataset.spans(number)


class ChangedSamples(SampleRoute):
    """The samples of another dataset, each transformed when it is read."""

    dataset: SampleDataset

    @property
    def prefix(self) -> str:
        return self.dataset.prefix

    def __len__(self) -> int:
        return len(self.dataset)

    def _route(self, sample: int) -> tuple[SampleDataset, int]:
        return self.dataset, sample
