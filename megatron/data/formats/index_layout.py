"""The layouts of an `.idx` file: its tables, their offsets, and the bytes of their entries.

The Megatron family has two: `MMIDIDX` ("mmap", written by every current preprocessing tool) and the older `TNTIDX`
("cached" and "lazy"). Nothing here touches a file: a writer or a merge gets the bytes and offsets of some sequences and
writes them in any order, from several processes.

Source: bigscience Megatron-DeepSpeed `megatron/data/indexed_dataset.py`; NVIDIA Megatron-LM
`megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

MMAP_MAGIC = b"MMIDIDX\x00\x00"
MMAP_HEADER = struct.Struct("<9sQBQQ")
CACHED_MAGIC = b"TNTIDX\x00\x00"
CACHED_HEADER = struct.Struct("<8sQQQQQQ")
LONGEST_MAGIC_BYTES = len(MMAP_MAGIC)
FORMAT_VERSION = 1
LONGEST_SEQUENCE_TOKENS = 2**31 - 1

DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    8: np.dtype("<u2"),
}
"""Code 7 is missing: it is float64 to bigscience and float32 to NVIDIA, and the size of the `.bin` file decides."""

CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

Entries = Iterator[tuple[int, bytes]]


@dataclass(frozen=True)
class IndexTables:
    """The byte offsets of the tables in an `.idx` file.

    Args:
        is_cached: the file has the older layout.
        documents: number of documents, without the leading 0 of their table.
    """

    is_cached: bool
    sequences: int
    documents: int

    @property
    def header(self) -> struct.Struct:
        return CACHED_HEADER if self.is_cached else MMAP_HEADER

    @property
    def at_starts(self) -> int:
        """Offset of the data offsets, in elements (cached), or of the pointers, in bytes (mmap)."""
        return self.header.size + (8 * (self.sequences + 1) if self.is_cached else 4 * self.sequences)

    @property
    def at_lengths(self) -> int:
        return self.at_starts + 8 * (self.sequences + 1) if self.is_cached else self.header.size

    @property
    def at_documents(self) -> int:
        """Offset of the document table: the number of sequences up to the end of each document."""
        return (self.at_lengths if self.is_cached else self.at_starts) + 8 * self.sequences

    @property
    def at_modes(self) -> int:
        """Offset of NVIDIA's modes, which only the mmap layout may have; the end of the file without them."""
        return self.at_documents + 8 * (self.documents + 1)


@dataclass(frozen=True)
class IndexLayout(IndexTables):
    """The bytes of an `.idx` file with known numbers of sequences and documents.

    Args:
        dtype: element type of the `.bin` file.
        has_modes: the file has a table of modes.
    """

    dtype: np.dtype[Any]
    tokens: int
    has_modes: bool = False

    @property
    def bin_bytes(self) -> int:
        """Size of the `.bin` file."""
        return self.tokens * self.dtype.itemsize

    @property
    def size_bytes(self) -> int:
        return self.at_modes + (self.sequences if self.has_modes else 0)

    def frame(self) -> Entries:
        """Yields the parts that do not depend on single sequences, as (byte offset, bytes)."""
        code = CODE_OF_DTYPE[self.dtype]
        entries = self.documents + 1
        if self.is_cached:
            counts = (self.sequences, self.sequences, entries)
            yield 0, CACHED_HEADER.pack(CACHED_MAGIC, FORMAT_VERSION, code, self.dtype.itemsize, *counts)
            yield self.at_starts - 8, np.array([self.sequences], "<i8").tobytes()
            yield self.at_lengths - 8, np.array([self.tokens], "<i8").tobytes()
        else:
            yield 0, MMAP_HEADER.pack(MMAP_MAGIC, FORMAT_VERSION, code, self.sequences, entries)
        yield self.at_documents, bytes(8)

    def of_sequences(self, first: int, lengths: np.ndarray, first_token: int) -> Entries:
        """Yields the entries of consecutive sequences, as (byte offset, bytes).

        Args:
            first: index of the first one in the file.
            lengths: in tokens.
            first_token: number of tokens before them.
        """
        ends = np.cumsum(lengths, dtype=np.int64) + first_token
        starts = ends - lengths
        if self.is_cached:
            yield CACHED_HEADER.size + 8 * first, np.arange(first, first + len(lengths), dtype="<i8").tobytes()
            yield self.at_lengths + 8 * first, lengths.astype("<i8").tobytes()
            yield self.at_starts + 8 * first, starts.astype("<i8").tobytes()
        else:
            yield self.at_lengths + 4 * first, lengths.astype("<i4").tobytes()
            yield self.at_starts + 8 * first, (starts * self.dtype.itemsize).astype("<i8").tobytes()

    def of_documents(self, first: int, ends: np.ndarray) -> tuple[int, bytes]:
        """Returns the entries of consecutive documents: (byte offset, bytes).

        Args:
            first: index of the first one in the file.
            ends: number of sequences in the file up to the end of each.
        """
        return self.at_documents + 8 * (first + 1), ends.astype("<i8").tobytes()

    def of_modes(self, first: int, modes: np.ndarray) -> tuple[int, bytes]:
        """Returns the modes of consecutive sequences: (byte offset, bytes)."""
        return self.at_modes + first, modes.tobytes()
