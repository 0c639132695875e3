"""Random prefixes of samples and documents: where they may end, what they depend on, and which labels count."""

from collections import Counter

import numpy as np
import pytest

from megatron.data.datasets.changed_samples import PrefixDataset, ShortenedDataset, prefix_length
from megatron.data.datasets.sample import DocumentSpan, Sample
from tests.data.samples import GivenRows

EOD = 9
ROWS = np.array(
    [
        [1, 2, 3, EOD, 5, 6, EOD, EOD, 7, 8, 1],  # documents of 4, 3 and 1 tokens, and the beginning of another
        [1, 2, 3, 4, 5, 6, 7, 8, 1, EOD, 2],  # the inputs end with the document
        [1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3],
    ]
)


def test_every_length_is_drawn_equally_often_and_depends_on_seed_sample_and_document() -> None:
    drawn = Counter(prefix_length(10, 3, sample, 0) for sample in range(20_000))
    assert sorted(drawn) == list(range(1, 11))
    # chi-squared with 9 degrees of freedom exceeds 27.9 once in a thousand seeds
    assert sum((count - 2000) ** 2 / 2000 for count in drawn.values()) < 27.9
    lengths = [[prefix_length(1000, *key) for key in zip(*keys, strict=True)] for keys in _keys()]
    assert len({tuple(row) for row in lengths}) == len(lengths)
    assert prefix_length(0, 1, 2, 3) == 1


def _keys() -> list[tuple[range | list[int], ...]]:
    same = [5] * 20
    return [(range(20), same, same), (same, range(20), same), (same, same, range(20))]


def test_one_prefix_a_sample() -> None:
    for seed in range(50):
        sample = PrefixDataset(GivenRows(ROWS), seed).read(0)
        assert sample.prefix_mask is not None and sample.loss_mask is None
        length = int(sample.prefix_mask.sum())
        assert length == prefix_length(10, seed, 0, 0) and sample.prefix_mask[:length].all()
        assert np.array_equal(sample.tokens, ROWS[0])


@pytest.mark.parametrize(("row", "documents"), [(0, [(0, 4), (4, 7), (7, 8), (8, 10)]), (1, [(0, 10)]), (2, [(0, 10)])])
def test_one_prefix_a_document_that_leaves_out_its_end(row: int, documents: list[tuple[int, int]]) -> None:
    lengths = set()
    for seed in range(50):
        sample = PrefixDataset(GivenRows(ROWS), seed, EOD).read(row)
        assert sample.prefix_mask is not None
        for number, (first, last) in enumerate(documents):
            mask = sample.prefix_mask[first:last]
            is_complete = bool(ROWS[row][last - 1] == EOD)
            length = prefix_length(last - first - is_complete, seed, row, number)
            assert mask.sum() == length and mask[:length].all()
            assert not (is_complete and last - first > 1 and mask[-1])
            lengths.add((number, length))
    assert len(lengths) > len(documents)


@pytest.mark.parametrize("eod_id", [None, EOD])
def test_labels_inside_a_prefix_do_not_count_and_the_first_target_does(eod_id: int | None) -> None:
    for seed in range(20):
        for row in range(3):
            sample = PrefixDataset(GivenRows(ROWS), seed, eod_id, on_targets_only=True).read(row)
            assert sample.prefix_mask is not None and sample.loss_mask is not None
            followed_by_prefix = np.append(sample.prefix_mask[1:], False)
            begins = np.append(False, ROWS[row][:-1] == EOD)[1:10] if eod_id else np.zeros(9, bool)
            inside = sample.prefix_mask & followed_by_prefix & ~np.append(begins, False)
            assert np.array_equal(sample.loss_mask, ~inside)


def test_a_mask_of_the_samples_still_holds() -> None:
    known = np.array([True] * 7 + [False] * 3)
    for seed in range(20):
        masked, alone = (
            PrefixDataset(GivenRows(ROWS, mask), seed, on_targets_only=True).read(1) for mask in (known, None)
        )
        assert np.array_equal(masked.loss_mask, alone.loss_mask & known)


LENGTH, WHOLE = 8, 32


class WholeRows(GivenRows):
    """Samples that count up from their number, with every field or with tokens only."""

    def __init__(self, *, has_labels: bool = False) -> None:
        super().__init__(np.arange(WHOLE + 1) + np.arange(400)[:, None])
        self.has_labels = has_labels

    def read(self, sample: int) -> Sample:
        text = self.rows[sample]
        if not self.has_labels:
            return Sample(text)
        mask, segments = np.ones(WHOLE, np.float32), np.zeros(WHOLE, np.int64)
        return Sample(text[:-1], mask, segments, segments > 0, text[1:], segments, is_swapped=True)

    def spans(self, sample: int) -> list[DocumentSpan]:
        return [DocumentSpan(4, 2, 6), DocumentSpan(5, 0, WHOLE - 5)]


def test_the_first_tokens_and_the_one_after_them() -> None:
    short = ShortenedDataset(WholeRows(), LENGTH)
    assert short[3].tolist() == list(range(3, 3 + LENGTH + 1))
    assert short.spans(3) == [DocumentSpan(4, 2, 6), DocumentSpan(5, 0, 3)]
    assert ShortenedDataset(WholeRows(), 5).spans(3) == [DocumentSpan(4, 2, 6)]
    assert (len(short), short.source_of(4), short.locate(3, 2)) == (400, 1, "row 3 column 2")


def test_every_field_is_cut() -> None:
    read = ShortenedDataset(WholeRows(has_labels=True), LENGTH).read(3)
    arrays = [part for part in read if isinstance(part, np.ndarray)]
    assert len(arrays) == 6 and all(part.shape == (LENGTH,) for part in arrays)
    assert read.labels is not None and read.labels.tolist() == list(range(4, 4 + LENGTH)) and read.is_swapped
