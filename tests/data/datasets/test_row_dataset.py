"""The order of rows: permutations piece by piece, the same on every resume, and samples read through it."""

import numpy as np
import pytest

from megatron.data.datasets.row_dataset import RowDataset
from megatron.data.order.plan import Segment
from megatron.errors import DataError


class Rows:
    """A source whose row r holds the tokens 10 r, 10 r + 1, ..., the second label of odd rows not counting."""

    prefix = "rows"
    fingerprint = "f"

    def __init__(self, count: int, reads_chunks: bool) -> None:
        self.count = count
        self.reads_chunks = reads_chunks
        self.chunk_rows = 6
        self.asked: list[int] = []

    def __len__(self) -> int:
        return self.count

    def blocks(self, first: int, last: int) -> np.ndarray:
        return np.append(np.arange(first, last, 2), last)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        self.asked.append(len(rows))
        mask = np.ones((len(rows), 3), bool)
        mask[rows % 2 == 1, 1] = False
        return (10 * rows[:, None] + np.arange(4)).astype(np.int32), mask

    def locate(self, row: int, position: int) -> str:
        return f"row {row}, position {position}"


@pytest.mark.parametrize("reads_chunks", [True, False])
def test_samples_are_rows_of_the_range_in_whole_epochs(reads_chunks: bool) -> None:
    source = Rows(40, reads_chunks)
    dataset = RowDataset(source, 5, 25, [Segment(30, 7, 40), Segment(3, 8, 20)])
    rows = [int(dataset[sample][0]) // 10 for sample in range(len(dataset))]
    assert len(dataset) == 60
    assert [sorted(rows[start : start + 20]) for start in (0, 20, 40)] == [list(range(5, 25))] * 3
    assert len({tuple(rows[start : start + 20]) for start in (0, 20, 40)}) == 3
    again = RowDataset(Rows(40, not reads_chunks), 5, 25, [Segment(30, 7, 40), Segment(3, 8, 20)])
    assert [int(again[sample][0]) // 10 for sample in reversed(range(60))] == rows[::-1]
    assert sum(source.asked) == 60 and max(source.asked) == (6 if reads_chunks else 1)


def test_a_sample_has_its_loss_mask_and_position() -> None:
    dataset = RowDataset(Rows(9, True), 0, 9, [Segment(9, 7, 9)])
    for sample in range(9):
        tokens, mask, *others = dataset.read(sample)
        assert not any(field is not None for field in others)
        row = int(tokens[0]) // 10
        assert tokens.dtype == np.int64 and mask is not None
        assert mask.tolist() == [True, row % 2 == 0, True]
        assert dataset.locate(sample, 2) == f"row {row}, position 2" and dataset.source_of(sample) == 0


def test_samples_beyond_the_plan_and_seeds_beyond_numpys_are_errors() -> None:
    dataset = RowDataset(Rows(9, True), 0, 9, [Segment(9, 7, 9)])
    for sample in (9, -1):
        with pytest.raises(IndexError, match=f"Sample {sample} is out of range: 9 samples of rows"):
            dataset.read(sample)
    with pytest.raises(DataError, match=r"The seed 4294967296 \(--seed\)"):
        RowDataset(Rows(9, True), 0, 9, [Segment(9, 2**32, 9)])
