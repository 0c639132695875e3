"""Examples of different lengths packed into rows, greedily in shuffled order.

Source: bigscience Megatron-DeepSpeed `megatron/data/decoder_packed_mtf_dataset.py` (`_build_index_mappings`,
`_build_sample_idx`); the rows of its first epoch are these.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np


class Packing(NamedTuple):
    """Which examples each row holds.

    Shapes:
        order: int64 [n], the examples in shuffled order.
        rows: int64 [r, 2], of each row the first of its examples in the order and one past the last.
    """

    order: np.ndarray
    rows: np.ndarray

    @property
    def left_out(self) -> int:
        """Examples that no row is long enough for."""
        return len(self.order) - int((self.rows[:, 1] - self.rows[:, 0]).sum())


def pack(lengths: np.ndarray, capacity: int, seed: int) -> Packing:
    """Shuffles examples and fills one row after another; an example that does not fit any more begins the next row.

    Shapes:
        lengths: [n], tokens of each example.

    Args:
        capacity: tokens of a row; longer examples are left out.
        seed: 0 to 2^32 - 1.
    """
    order = np.arange(len(lengths), dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    rows = []
    first, taken = 0, 0  # of the row that is begun, and tokens before it
    while first < len(order):
        last = int(np.searchsorted(ends, taken + capacity, side="right"))
        if last > first:
            rows.append((first, last))
        else:
            last = first + 1
        first, taken = last, int(ends[last - 1])
    return Packing(order, np.array(rows, np.int64).reshape(-1, 2))
