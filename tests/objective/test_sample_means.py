"""The weights that make every sample count the same."""

from __future__ import annotations

import numpy as np

from megatron.objective.sample_means import sample_means


def test_the_weights_of_a_sample_sum_to_one_over_its_counted_labels() -> None:
    mask = np.array([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0], [0.5, 0, 0, 0.25]], np.float32)
    found = sample_means(mask)
    assert found.samples == 3
    assert found.weights.dtype == np.float32
    assert (found.weights * mask).sum(axis=1).tolist() == [1, 1, 0, 1]
    assert found.weights[:, 0].tolist() == [0.5, 0.25, 0.0, np.float32(1 / 0.75)]


def test_packed_samples_count_each() -> None:
    mask = np.array([[0, 1, 1, 1, 0], [1, 1, 1, 1, 1]], np.float32)
    segments = np.array([[0, 0, 1, 1, 2], [0, 0, 0, 0, 1]])
    found = sample_means(mask, segments)
    assert found.samples == 4  # the padding of the first row is a segment without labels
    assert (found.weights * mask).tolist() == [[0, 1, 0.5, 0.5, 0], [0.25, 0.25, 0.25, 0.25, 1]]
