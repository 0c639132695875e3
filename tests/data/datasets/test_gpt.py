"""Samples of a token file: the golden order, and where each token is stored."""

import numpy as np
import pytest

from megatron.errors import DataError
from tests.data.corpora import GOLDEN_LENGTHS
from tests.data.datasets.token_datasets import build, config


def test_samples_follow_the_golden_order(corpus):
    """Row j of the golden sample index begins at token 8j of the documents laid out in the golden order."""
    datasets, _ = build(config(corpus))
    starts = np.concatenate([[0], np.cumsum(GOLDEN_LENGTHS)])
    stream = np.concatenate([np.arange(starts[d], starts[d + 1]) for d in [7, 2, 9, 1, 0, 8, 4, 5, 6, 3]])
    for sample, row in enumerate([7, 3, 5, 1, 4, 8, 0, 2, 6]):
        tokens = datasets.train[sample]
        assert tokens.dtype == np.int64 and tokens.tolist() == stream[8 * row : 8 * row + 9].tolist()
    with pytest.raises(IndexError, match="Sample 9 is out of range: 9 samples of .* are planned"):
        datasets.train[9]


def test_every_token_can_be_located(corpus):
    datasets, _ = build(config(corpus))
    for sample in range(9):
        for position, token in enumerate(datasets.train[sample]):
            assert f"(byte offset {4 * int(token)})" in datasets.train.locate(sample, position)
    with pytest.raises(IndexError, match="Position 9 is beyond the tokens of sample 0"):
        datasets.train.locate(0, 9)


def test_a_damaged_index_that_names_missing_tokens_is_a_data_error(corpus):
    datasets, _ = build(config(corpus))
    dataset = datasets.train
    segment = dataset._segments[0]
    dataset._segments = (segment._replace(sample=segment.sample + np.array([0, 50], np.int32)),)
    with pytest.raises(DataError, match="sample index of .* is damaged: .*Delete the index cache"):
        dataset[0]
    dataset._segments = (segment._replace(sample=np.zeros_like(segment.sample)),)
    with pytest.raises(DataError, match="sample 0 has 1 tokens, expected 9"):
        dataset[0]
