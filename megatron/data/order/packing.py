"""Packing of examples of different lengths into rows: greedily in shuffled order, or best-fit.

Best-fit decreasing: the longest example first, each into the fullest row that has room for it. It runs on one block of
consecutive examples at a time, so that a row holds nearby examples, rows follow the order of the examples, and the cost
per example does not grow with their number.

Source: bigscience Megatron-DeepSpeed `megatron/data/decoder_packed_mtf_dataset.py` (`_build_index_mappings`,
`_build_sample_idx`), whose first epoch `pack` reproduces; Johnson, "Near-optimal bin packing algorithms", 1973
(best-fit decreasing needs at most 11/9 of the optimal rows); Ding et al., "Fewer truncations improve language
modeling", 2024 (for the packing of documents).
"""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import NamedTuple

import numpy as np

BLOCK_EXAMPLES = 1 << 14


class Packing(NamedTuple):
    """The examples of each row.

    Shapes:
        order: int64 [n], the examples in shuffled order.
        rows: int64 [r, 2], range of each row's examples in the order.
    """

    order: np.ndarray
    rows: np.ndarray

    @property
    def skipped(self) -> int:
        """Examples longer than a row."""
        return len(self.order) - int((self.rows[:, 1] - self.rows[:, 0]).sum())


def pack(lengths: np.ndarray, capacity: int, seed: int) -> Packing:
    """Shuffles examples and fills one row after another; an example that does not fit starts the next row.

    Shapes:
        lengths: [n], tokens of each example.

    Args:
        capacity: tokens of a row; longer examples are skipped.
        seed: 0 to 2^32 - 1.
    """
    order = np.arange(len(lengths), dtype=np.int64)
    np.random.RandomState(seed).shuffle(order)
    ends = np.cumsum(lengths[order], dtype=np.int64)
    rows = []
    first, taken = 0, 0  # start of the current row, and tokens before it
    while first < len(order):
        last = int(np.searchsorted(ends, taken + capacity, side="right"))
        if last > first:
            rows.append((first, last))
        else:
            last = first + 1
        first, taken = last, int(ends[last - 1])
    return Packing(order, np.array(rows, np.int64).reshape(-1, 2))


class FilledRows(NamedTuple):
    """The examples of each row.

    Shapes:
        order: int64 [n], the examples row by row, ascending within a row.
        starts: int64 [r + 1], index of each row's first example in the order, then n.
    """

    order: np.ndarray
    starts: np.ndarray


def best_fit(lengths: np.ndarray, capacity: int) -> FilledRows:
    """Packs examples that are no longer than a row.

    Shapes:
        lengths: [n], tokens of each example.

    Args:
        capacity: tokens of a row.
    """
    order: list[int] = []
    starts = [0]
    for first in range(0, len(lengths), BLOCK_EXAMPLES):
        for row in _filled(lengths[first : first + BLOCK_EXAMPLES], capacity):
            order += [first + example for example in row]
            starts.append(len(order))
    return FilledRows(np.array(order, np.int64), np.array(starts, np.int64))


def _filled(lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Returns the rows of one block, each sorted, in the order of their first examples."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # free tokens of a row, and the row; sorted
    for example in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[example])
        fullest = bisect_left(room, (length, -1))
        if fullest == len(room):
            left, row = capacity, len(rows)
            rows.append([])
        else:
            left, row = room.pop(fullest)
        rows[row].append(example)
        insort(room, (left - length, row))
    return sorted(map(sorted, rows))
