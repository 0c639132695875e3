"""Weights of labels that make every sample count the same, however many of its labels count."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class SampleMeans(NamedTuple):
    """How labels count when the loss is a mean over samples of means over the labels of a sample.

    Shapes: weights float32 `[b, s]`.

    Attributes:
        weights: what the loss of a label is multiplied by, after the loss mask: 1 / (sum of the loss mask over its
            sample); 0 where nothing of the sample counts.
        samples: number of samples of which something counts.
    """

    weights: np.ndarray
    samples: int


def sample_means(loss_mask: np.ndarray, segment_ids: np.ndarray | None = None) -> SampleMeans:
    """The weights of a micro-batch.

    Shapes: loss_mask float32 `[b, s]`; segment_ids int64 `[b, s]`, from 0.

    Args:
        segment_ids: where several samples are packed into a row, which of them each label belongs to; None if every row
            is a sample.

    Source: jisngprk/dsGPT2 `ds_trainer.py` (`_backward_step`), which takes the mean of a sequence first because sums
    over a batch exceed what float16 holds.
    """
    rows, length = loss_mask.shape
    numbers = np.zeros(loss_mask.shape, np.int64) if segment_ids is None else segment_ids
    numbers = numbers + np.arange(rows)[:, None] * (length + 1)  # one for each sample of the micro-batch
    totals = np.bincount(numbers.ravel(), loss_mask.ravel(), minlength=rows * (length + 1))
    shares = np.divide(1.0, totals, out=np.zeros_like(totals), where=totals > 0)
    return SampleMeans(shares[numbers].astype(np.float32), int((totals > 0).sum()))
