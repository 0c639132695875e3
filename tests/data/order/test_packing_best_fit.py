"""Packing by best fit: every example once, no row too long, few rows, and the order of the examples kept."""

import numpy as np
import pytest

from megatron.data.order.packing import best_fit


def rows_of(packed):
    return [packed.order[first:last].tolist() for first, last in zip(packed.starts, packed.starts[1:], strict=False)]


def test_small_case_by_hand():
    packed = best_fit(np.array([5, 4, 3, 3, 2, 1]), 6)
    assert rows_of(packed) == [[0, 5], [1, 4], [2, 3]]


@pytest.mark.parametrize("seed", range(5))
def test_every_example_once_in_rows_that_hold_it(seed):
    lengths = np.random.default_rng(seed).integers(1, 100, 700)
    packed = best_fit(lengths, 100)
    assert sorted(packed.order.tolist()) == list(range(700))
    rows = rows_of(packed)
    assert max(int(lengths[row].sum()) for row in rows) <= 100
    assert all(row == sorted(row) for row in rows)
    assert [row[0] for row in rows] == sorted(row[0] for row in rows)
    assert len(rows) <= 11 / 9 * lengths.sum() / 100 + 1


def test_blocks_are_packed_by_themselves(monkeypatch):
    lengths = np.random.default_rng(0).integers(1, 50, 100)
    whole = [best_fit(part, 60) for part in (lengths[:40], lengths[40:80], lengths[80:])]
    monkeypatch.setattr("megatron.data.order.packing.BLOCK_EXAMPLES", 40)
    packed = best_fit(lengths, 60)
    expected = [[40 * block + one for one in row] for block, part in enumerate(whole) for row in rows_of(part)]
    assert rows_of(packed) == expected
