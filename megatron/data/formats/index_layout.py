"""The bytes of an `.idx` file for the sequences it lists: which tables there are, where each begins, and what it holds.

Nothing here touches a file: a writer or a merge asks for the bytes of some sequences and puts them where they belong,
in any order and from several processes.

Source: bigscience Megatron-DeepSpeed `megatron/data/indexed_dataset.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from megatron.data.formats.token_index import (
    CACHED_HEADER,
    CACHED_MAGIC,
    CODE_OF_DTYPE,
    FORMAT_VERSION,
    MMAP_HEADER,
    MMAP_MAGIC,
)

Entries = Iterator[tuple[int, bytes]]


@dataclass(frozen=True)
class IndexLayout:
    """Where everything is in the `.idx` file of a given number of sequences and documents.

    Args:
        is_cached: upstream's older layout, which its "cached" and "lazy" readers share.
        dtype: element type of the `.bin` file.
        documents: documents, without the leading 0 of their table.
        has_modes: whether NVIDIA's table of modes follows (the mmap layout only).
    """

    is_cached: bool
    dtype: np.dtype[Any]
    sequences: int
    documents: int
    tokens: int
    has_modes: bool = False

    @cached_property
    def size_bytes(self) -> int:
        """Size of the file."""
        return self._at_modes + (self.sequences if self.has_modes else 0)

    def frame(self) -> Entries:
        """What does not depend on the sequences, as (byte offset, bytes): the header, the 0 that begins the document
        table, and the sums that end the offsets of the cached layout.
        """
        code = CODE_OF_DTYPE[self.dtype]
        entries = self.documents + 1
        if self.is_cached:
            counts = (self.sequences, self.sequences, entries)
            yield 0, CACHED_HEADER.pack(CACHED_MAGIC, FORMAT_VERSION, code, self.dtype.itemsize, *counts)
            yield self._at_starts - 8, np.array([self.sequences], "<i8").tobytes()
            yield self._at_lengths - 8, np.array([self.tokens], "<i8").tobytes()
        else:
            yield 0, MMAP_HEADER.pack(MMAP_MAGIC, FORMAT_VERSION, code, self.sequences, entries)
        yield self._at_documents, bytes(8)

    def of_sequences(self, first: int, lengths: np.ndarray, first_token: int) -> Entries:
        """The entries of sequences that follow each other, as (byte offset, bytes).

        Args:
            first: number of the first of them in the file.
            lengths: their tokens.
            first_token: tokens before them.
        """
        ends = np.cumsum(lengths, dtype=np.int64) + first_token
        starts = ends - lengths
        if self.is_cached:
            yield CACHED_HEADER.size + 8 * first, np.arange(first, first + len(lengths), dtype="<i8").tobytes()
            yield self._at_lengths + 8 * first, lengths.astype("<i8").tobytes()
            yield self._at_starts + 8 * first, starts.astype("<i8").tobytes()
        else:
            yield self._at_lengths + 4 * first, lengths.astype("<i4").tobytes()
            yield self._at_starts + 8 * first, (starts * self.dtype.itemsize).astype("<i8").tobytes()

    def of_documents(self, first: int, ends: np.ndarray) -> tuple[int, bytes]:
        """The entries of documents that follow each other: (byte offset, bytes).

        Args:
            first: number of the first of them in the file.
            ends: sequences of the file up to the end of each.
        """
        return self._at_documents + 8 * (first + 1), ends.astype("<i8").tobytes()

    def of_modes(self, first: int, modes: np.ndarray) -> tuple[int, bytes]:
        """The modes of sequences that follow each other: (byte offset, bytes)."""
        return self._at_modes + first, modes.tobytes()

    @property
    def _at_starts(self) -> int:
        """Of the data offsets in elements (cached), or of the pointers in bytes (mmap)."""
        if self.is_cached:
            return CACHED_HEADER.size + 8 * (self.sequences + 1)
        return MMAP_HEADER.size + 4 * self.sequences

    @property
    def _at_lengths(self) -> int:
        return self._at_starts + 8 * (self.sequences + 1) if self.is_cached else MMAP_HEADER.size

    @property
    def _at_documents(self) -> int:
        return self._at_lengths + 8 * self.sequences if self.is_cached else self._at_starts + 8 * self.sequences

    @property
    def _at_modes(self) -> int:
        return self._at_documents + 8 * (self.documents + 1)
