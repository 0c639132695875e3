"""Samples cut for a curriculum, and prefixes drawn within the cut."""

from __future__ import annotations

import numpy as np

from megatron.data.datasets.changed_samples import PrefixDataset, ShortenedDataset
from megatron.data.datasets.sample import DocumentSpan, Sample

LENGTH, WHOLE = 8, 32


class Rows:
    """Samples with every field, or with tokens only."""

    def __init__(self, *, has_labels: bool = False) -> None:
        self.has_labels = has_labels

    def __len__(self) -> int:
        return 400

    def __getitem__(self, sample: int) -> np.ndarray:
        return self.read(sample).tokens

    def read(self, sample: int) -> Sample:
        text = np.arange(sample, sample + WHOLE + 1)
        if not self.has_labels:
            return Sample(text)
        mask, segments = np.ones(WHOLE, np.float32), np.zeros(WHOLE, np.int64)
        return Sample(text[:-1], mask, segments, segments > 0, text[1:], segments, is_swapped=True)

    def source_of(self, sample: int) -> int:
        return sample % 3

    def locate(self, sample: int, position: int) -> str:
        return f"{sample}:{position}"

    def spans(self, sample: int) -> list[DocumentSpan]:
        return [DocumentSpan(4, 2, 6), DocumentSpan(5, 0, WHOLE - 5)]


def test_the_first_tokens_and_the_one_after_them() -> None:
    short = ShortenedDataset(Rows(), LENGTH)
    assert short[3].tolist() == list(range(3, 3 + LENGTH + 1))
    assert short.spans(3) == [DocumentSpan(4, 2, 6), DocumentSpan(5, 0, 3)]
    assert ShortenedDataset(Rows(), 5).spans(3) == [DocumentSpan(4, 2, 6)]
    assert (len(short), short.source_of(4), short.locate(3, 2)) == (400, 1, "3:2")


def test_every_field_is_cut() -> None:
    read = ShortenedDataset(Rows(has_labels=True), LENGTH).read(3)
    arrays = [part for part in read if isinstance(part, np.ndarray)]
    assert len(arrays) == 6 and all(part.shape == (LENGTH,) for part in arrays)
    assert read.labels is not None and read.labels.tolist() == list(range(4, 4 + LENGTH)) and read.is_swapped


def test_prefixes_are_drawn_within_the_cut() -> None:
    dataset = PrefixDataset(ShortenedDataset(Rows(), LENGTH), 1234, on_targets_only=True)
    masks = [dataset.read(sample).loss_mask for sample in range(400)]
    counted = np.array([mask.sum() for mask in masks if mask is not None])
    assert counted.min() == 1 and counted.max() == LENGTH
    assert abs(counted.mean() - (LENGTH + 1) / 2) < 0.4, "what the objective divides by"
