"""An index of the signatures of all kept documents, which looks up a block of new ones at once.

Memory per kept document, with p permutations and b bands: 2 p bytes for the signature, 4 b for the links between
documents that share a band, 16 b to 32 b for the table of bands, 8 for its number: with 128 permutations and the
threshold 0.7 (25 bands) 0.76 to 1.16 kB. `datasketch.MinHashLSH` keeps the same in dictionaries of sets, in ten times
the memory.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trident.corpus.cleaning.documents.words import Hashes
from trident.corpus.cleaning.near_duplicates.key_table import KeyTable

# Newest documents of a band to compare with; bounds the time if a template makes thousands share a band.
_MOST_COMPARED = 64
_GROWTH = 1.25
_FIRST_ROWS = 1024

Signatures = npt.NDArray[np.uint16]


@dataclass(frozen=True)
class _Batch:
    """The documents of one block to look up.

    Args:
        heads: 1 + the row of the newest kept document with the same band, 0 if none.
        shared: another document of the block has the same band.
    """

    signatures: Signatures
    keys: Hashes
    heads: npt.NDArray[np.uint32]
    shared: npt.NDArray[np.bool_]


class NearIndex:
    """The kept documents; a new one is a duplicate if its similarity to one of them reaches the threshold.

    Args:
        threshold: minimum estimated Jaccard similarity, from 0 to 1.
    """

    def __init__(self, threshold: float, permutations: int, bands: int) -> None:
        self._threshold = threshold
        self._table = KeyTable(1, with_values=True)
        self._signatures = np.zeros((_FIRST_ROWS, permutations), np.uint16)
        self._older = np.zeros((_FIRST_ROWS, bands), np.uint32)  # 1 + the row that had the band before
        self._numbers = np.zeros(_FIRST_ROWS, np.int64)
        self._rows = 0

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return self._table.nbytes + self._signatures.nbytes + self._older.nbytes + self._numbers.nbytes

    def duplicates_of(
        self, signatures: Signatures, keys: Hashes, numbers: npt.NDArray[np.int64]
    ) -> list[tuple[int, float] | None]:
        """For each document the number of the kept document most similar to it, and the similarity; None if it is kept.

        A document without words (keys of 0) is kept and not remembered.

        Args:
            numbers: of the documents; they rise.
        """
        there, rows = self._table.find(keys.reshape(-1, 1))
        heads = np.zeros(keys.size, np.uint32)
        heads[there] = rows + np.uint32(1)
        _, inverse, counts = np.unique(keys.reshape(-1), return_inverse=True, return_counts=True)
        shared = (counts[inverse] > 1).reshape(keys.shape)
        new = _Batch(signatures, keys, heads.reshape(keys.shape), shared)
        has_words = keys.any(axis=1)
        local: dict[int, list[int]] = {}
        duplicates: list[tuple[int, float] | None] = [None] * len(keys)
        for index in np.flatnonzero(has_words & (new.heads.any(axis=1) | shared.any(axis=1))).tolist():
            duplicates[index] = self._most_similar(new, index, local, numbers)
            if duplicates[index] is None:
                for key in keys[index, shared[index]].tolist():
                    local.setdefault(key, []).append(index)
        stays = has_words & np.array([entry is None for entry in duplicates], np.bool_)
        self._remember(new, np.flatnonzero(stays), numbers)
        return duplicates

    def _most_similar(
        self, new: _Batch, index: int, local: dict[int, list[int]], numbers: npt.NDArray[np.int64]
    ) -> tuple[int, float] | None:
        signature = new.signatures[index]
        steps = np.full(new.keys.shape[1], _MOST_COMPARED)
        here: set[int] = set()
        for band in np.flatnonzero(new.shared[index]).tolist():
            newest = local.get(int(new.keys[index, band]), [])[-_MOST_COMPARED:]
            here.update(newest)
            steps[band] -= len(newest)
        rows = self._rows_below(new.heads[index], steps)
        near = sorted(here)
        known = np.concatenate((self._numbers[rows], numbers[near]))
        others = np.concatenate((self._signatures[rows], new.signatures[near]))
        if not len(known):
            return None
        similar = np.count_nonzero(others == signature, axis=1) / others.shape[1]
        best = float(similar.max())
        return (int(known[similar == best].min()), best) if best >= self._threshold else None

    def _rows_below(self, heads: npt.NDArray[np.uint32], steps: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Returns rows that share a band: the newest of each band and up to `steps` older ones."""
        bands = np.flatnonzero((heads > 0) & (steps > 0))
        rows = heads[bands].astype(np.int64) - 1
        parts = []
        for step in range(1, _MOST_COMPARED + 1):
            if not bands.size:
                break
            parts.append(rows)
            older = self._older[rows, bands].astype(np.int64)
            on = (older > 0) & (steps[bands] > step)
            rows, bands = older[on] - 1, bands[on]
        return np.unique(np.concatenate(parts)) if parts else rows

    def _remember(self, new: _Batch, kept: npt.NDArray[np.intp], numbers: npt.NDArray[np.int64]) -> None:
        first, self._rows = self._rows, self._rows + len(kept)
        if self._rows > len(self._numbers):
            size = max(self._rows, int(len(self._numbers) * _GROWTH))
            for array in (self._signatures, self._older, self._numbers):
                array.resize((size, *array.shape[1:]), refcheck=False)  # in place: no second copy
        bands = new.keys.shape[1]
        keys = new.keys[kept].reshape(-1)
        rows = np.repeat(np.arange(first, self._rows, dtype=np.uint32), bands)
        order = np.argsort(keys, kind="stable")
        again = keys[order][1:] == keys[order][:-1]
        older = new.heads[kept].reshape(-1).copy()
        older[order[1:][again]] = rows[order[:-1][again]] + np.uint32(1)
        newest = order[np.concatenate((~again, np.ones(min(1, len(order)), np.bool_)))]
        self._table.put(keys[newest].reshape(-1, 1), rows[newest])
        self._signatures[first : self._rows] = new.signatures[kept]
        self._older[first : self._rows] = older.reshape(-1, bands)
        self._numbers[first : self._rows] = numbers[kept]
