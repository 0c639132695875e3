"""Deduplication: it must see all documents in order, so it runs in the parent."""

from __future__ import annotations

from bisect import bisect_right

import numpy as np

from trident.corpus.cleaning.cleaner import CleanedBlock
from trident.corpus.cleaning.documents.clean_options import CleanOptions
from trident.corpus.cleaning.filters.rejections import EXACT_DUPLICATE, NEAR_DUPLICATE, Rejection
from trident.corpus.cleaning.near_duplicates.key_table import KeyTable
from trident.corpus.cleaning.near_duplicates.near_index import NearIndex
from trident.corpus.cleaning.near_duplicates.signatures import band_shape


class DuplicateFilter:
    """Drops documents similar to an earlier one; the first is kept."""

    def __init__(self, options: CleanOptions) -> None:
        self._exact = ExactDuplicates() if options.exact_duplicates else None
        near = options.near
        self._near = None
        if near is not None:
            bands, _ = band_shape(near.permutations, near.threshold)
            self._near = NearIndex(near.threshold, near.permutations, bands)
        self._read = 0
        self._sources: list[tuple[int, str, int]] = []

    def rejections(self, cleaned: CleanedBlock, path: str, line: int) -> list[Rejection | None]:
        """Returns a rejection for each passed document of a block, None if it is kept.

        Args:
            path, line: the input, and the number of its documents before the block.
        """
        if not self._sources or self._sources[-1][1] != path or line == 0:
            self._sources.append((self._read, path, line))
        rejections: list[Rejection | None] = [None] * len(cleaned.passed)
        if self._exact is not None:
            rejections = self._exact.rejections(cleaned)
        if self._near is not None:
            left = np.flatnonzero([rejection is None for rejection in rejections])
            numbers = cleaned.passed[left] + self._read
            duplicates = self._near.duplicates_of(cleaned.signatures[left], cleaned.band_keys[left], numbers)
            for index, earlier in zip(left.tolist(), duplicates, strict=True):
                if earlier is not None:
                    rejections[index] = Rejection(NEAR_DUPLICATE, f"{earlier[1]:.2f} like {self._location(earlier[0])}")
        self._read += cleaned.lines
        return rejections

    def _location(self, number: int) -> str:
        """Returns input and line of a document, given its index among all read documents."""
        first, path, line = self._sources[bisect_right(self._sources, number, key=lambda entry: entry[0]) - 1]
        return f"{path}:{number - first + line + 1}"


class ExactDuplicates:
    """Remembers the hash of every text: 21 to 43 bytes per document (16 of them the hash, the rest free slots)."""

    def __init__(self) -> None:
        self._table = KeyTable(2, with_values=False)

    def rejections(self, cleaned: CleanedBlock) -> list[Rejection | None]:
        """Returns a rejection for each passed document of a block, None for the first of its kind."""
        seen, _ = self._table.find(cleaned.digests)
        hashes = cleaned.digests.tobytes()
        first: dict[bytes, int] = {}
        for number in range(len(seen)):
            if first.setdefault(hashes[16 * number : 16 * number + 16], number) != number:
                seen[number] = True
        self._table.put(cleaned.digests[~seen])
        return [Rejection(EXACT_DUPLICATE) if is_seen else None for is_seen in seen.tolist()]
