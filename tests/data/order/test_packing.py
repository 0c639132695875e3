"""Greedy packing against a plain loop, and its edges."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.data.order.packing import pack


def _packed_one_by_one(lengths: list[int], capacity: int, seed: int) -> list[list[int]]:
    """The examples of each row, taken one after another."""
    order = np.arange(len(lengths))
    np.random.RandomState(seed).shuffle(order)
    rows: list[list[int]] = [[]]
    for example in order.tolist():
        taken = sum(lengths[other] for other in rows[-1])
        if lengths[example] > capacity:
            rows.append([])
        elif taken + lengths[example] > capacity:
            rows.append([example])
        else:
            rows[-1].append(example)
    return [row for row in rows if row]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.integers(0, 14), min_size=1, max_size=60), st.integers(1, 12), st.integers(0, 2**32 - 1))
def test_rows_are_filled_one_after_another(lengths: list[int], capacity: int, seed: int) -> None:
    packing = pack(np.array(lengths), capacity, seed)
    rows = [packing.order[first:last].tolist() for first, last in packing.rows]
    assert rows == _packed_one_by_one(lengths, capacity, seed)
    assert packing.skipped == sum(length > capacity for length in lengths)


def test_the_order_is_a_shuffle_by_the_seed() -> None:
    packing = pack(np.full(50, 3), 10, 7)
    assert sorted(packing.order.tolist()) == list(range(50)) and packing.order.tolist() != list(range(50))
    assert packing.rows.dtype == packing.order.dtype == np.int64
    assert (packing.rows[:, 1] - packing.rows[:, 0]).tolist() == [3] * 16 + [2]
    assert np.array_equal(pack(np.full(50, 3), 10, 7).order, packing.order)
    assert not np.array_equal(pack(np.full(50, 3), 10, 8).order, packing.order)
