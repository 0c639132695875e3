"""What a data set returns for a number: the tokens of one sample and, where not all of its labels count, a mask."""

from __future__ import annotations

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
        is_swapped: whether the two parts of the sample stand in the wrong order; None if it has no such parts.
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
