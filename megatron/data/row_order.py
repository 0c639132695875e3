"""The order in which a row source (Parquet windows, a document store) gives its rows: a new permutation each epoch.

A permutation of all rows at once would cost memory for every row and jump over the whole source at every step, which
files that are stored in groups of rows punish. So the rows are cut into blocks of consecutive rows, the blocks are
shuffled, and the rows of so many blocks as make a chunk are shuffled among themselves. A source of one chunk is
shuffled as a whole. Each part is computed when it is reached, from the seed, the epoch and its number alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Shuffling:
    """How finely rows are shuffled.

    Args:
        block_rows: consecutive rows that stay in one chunk.
        chunk_blocks: blocks whose rows are shuffled together.
    """

    block_rows: int
    chunk_blocks: int


class RowOrder:
    """A permutation of `rows` rows.

    Args:
        seed: of the segment, 0 to 2^32 - 1.
        epoch: its number within the segment.
    """

    def __init__(self, rows: int, shuffling: Shuffling, seed: int, epoch: int) -> None:
        self._rows = rows
        self._shuffling = shuffling
        self._seed = seed
        self._epoch = epoch
        count = -(-rows // shuffling.block_rows)
        self._blocks = np.random.RandomState([seed, epoch]).permutation(count)
        sizes = np.minimum(shuffling.block_rows, rows - self._blocks * shuffling.block_rows)
        self._starts = (np.cumsum(sizes) - sizes)[:: shuffling.chunk_blocks]

    def __len__(self) -> int:
        return self._rows

    def place(self, position: int) -> tuple[int, int]:
        """The chunk in which a position of the order lies, and its place in that chunk."""
        chunk = int(np.searchsorted(self._starts, position, side="right")) - 1
        return chunk, position - int(self._starts[chunk])

    def chunk(self, number: int) -> np.ndarray:
        """The rows of a chunk in their order, int64."""
        first = number * self._shuffling.chunk_blocks
        blocks = self._blocks[first : first + self._shuffling.chunk_blocks].astype(np.int64)
        rows = (blocks[:, None] * self._shuffling.block_rows + np.arange(self._shuffling.block_rows)).ravel()
        rows = rows[rows < self._rows]
        np.random.RandomState([self._seed, self._epoch, 1 + number]).shuffle(rows)
        return rows
