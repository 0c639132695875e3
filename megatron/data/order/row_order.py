"""The order of rows from a row source (Parquet windows, a document store): a new permutation each epoch.

A permutation of all rows would cost memory for every row and jump across the whole source at every step, which is slow
for files stored in row groups. So the source declares blocks of consecutive rows that are cheap to read together; the
blocks are shuffled and grouped into chunks, and rows are shuffled within a chunk. A source of one chunk is shuffled as
a whole. Each chunk is computed on demand, from the seed, the epoch and its index alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np


class EpochRowOrder:
    """A permutation of the rows of consecutive blocks.

    Args:
        edges: first row of every block, then the end of the last, int64 [blocks + 1]; no block is empty.
        chunk_rows: approximate size of a chunk, which consists of whole blocks.
        seed: of the segment, 0 to 2^32 - 1.
        epoch: index within the segment.
    """

    def __init__(self, edges: np.ndarray, chunk_rows: int, seed: int, epoch: int) -> None:
        self._edges = edges
        self._seed = seed
        self._epoch = epoch
        self._blocks = np.random.RandomState([seed, epoch]).permutation(len(edges) - 1)
        sizes = np.diff(edges)[self._blocks]
        starts = np.cumsum(sizes) - sizes  # of each block, in the order
        _, self._first_blocks = np.unique(starts // chunk_rows, return_index=True)  # of each chunk
        self._starts = starts[self._first_blocks]

    def __len__(self) -> int:
        return int(self._edges[-1] - self._edges[0])

    def chunk_of(self, position: int) -> tuple[int, int]:
        """Returns the chunk that contains a position of the order, and the offset in that chunk."""
        chunk = int(np.searchsorted(self._starts, position, side="right")) - 1
        return chunk, position - int(self._starts[chunk])

    def chunk(self, number: int) -> np.ndarray:
        """Returns the rows of a chunk in their order, int64."""
        first, *rest = self._first_blocks[number : number + 2].tolist()
        blocks = self._blocks[first : rest[0] if rest else None].tolist()
        rows = np.concatenate([np.arange(self._edges[block], self._edges[block + 1]) for block in blocks])
        np.random.RandomState([self._seed, self._epoch, 1 + number]).shuffle(rows)
        return rows


class RowSource(ABC):
    """Rows by index, each a sample. By default rows are read one by one, with random access.

    Attributes:
        prefix: the source as named by the user.
        reads_chunks: True if reading a chunk of the order at once is cheaper than reading its rows one by one.
    """

    prefix: str
    fingerprint: str
    """Hash that changes with the rows or their order, wherever they are stored."""

    reads_chunks = False

    @property
    def chunk_rows(self) -> int:
        """Approximate number of rows shuffled together; it affects the order, as the blocks do."""
        return 1 << 16

    @abstractmethod
    def __len__(self) -> int: ...

    def blocks(self, first: int, last: int) -> np.ndarray:
        """Splits the rows [first, last) into blocks that are cheap to read together; by default one row each.

        Shapes:
            result: int64 [blocks + 1], the first row of each, then `last`.
        """
        return np.arange(first, last + 1)

    @abstractmethod
    def read(self, rows: np.ndarray) -> tuple[np.ndarray, ...]:
        """Reads rows: the fields of `Sample` in order, each for all rows; trailing fields may be omitted.

        Shapes:
            rows: int64 [n]; result: token ids [n, s + 1] of any integer type, loss mask bool [n, s], segments int64
            [n, s] with padding as a separate segment, and so on.

        Raises:
            DataError, StorageError: a row is damaged, missing or unreachable.
        """

    @abstractmethod
    def locate(self, row: int, position: int) -> str:
        """Describes the location of a token of a row."""
