"""A hash table of random keys in two arrays, with vectorized lookup and little memory overhead.

Open addressing with linear probing; the table doubles when three quarters are used, so it is at least three eighths
full and a key of w words takes 8 w / 0.75 to 8 w / 0.375 bytes (values likewise; half as much again while it doubles).

Source: Knuth, The Art of Computer Programming 3, § 6.4, algorithm L.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

_MOST_USED = 0.75
_FIRST_SLOTS = 1 << 12
_REHASHED_SLOTS = 1 << 20


class KeyTable:
    """Keys of one or more 64-bit words with random bits, each with an optional value.

    Args:
        words: 64-bit words per key.
        with_values: store a uint32 value per key.
    """

    def __init__(self, words: int, with_values: bool) -> None:
        self._keys = np.zeros((_FIRST_SLOTS, words), np.uint64)
        self._values = np.zeros(_FIRST_SLOTS if with_values else 0, np.uint32)
        self._used = 0

    def __len__(self) -> int:
        return self._used

    @property
    def nbytes(self) -> int:
        """Bytes of both arrays."""
        return self._keys.nbytes + self._values.nbytes

    def find(self, keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.uint32]]:
        """Returns a mask of the known keys, and their values.

        Shapes:
            keys: [n, words] -> bool [n], uint32 [number found] (empty without values).
        """
        keys = _without_zero(keys)
        slots = _slots(self._keys, keys)
        present = (self._keys[slots] == keys).all(axis=1)
        return present, self._values[slots[present]] if self._values.size else self._values

    def put(self, keys: npt.NDArray[np.uint64], values: npt.NDArray[np.uint32] | None = None) -> None:
        """Adds distinct keys, or updates the values of known ones.

        Shapes:
            keys: [n, words]; values: [n].
        """
        while self._used + len(keys) > _MOST_USED * len(self._keys):
            self._double()
        keys = _without_zero(keys)
        slots = _insert(self._keys, keys)
        self._used += slots[1]
        if values is not None:
            self._values[slots[0]] = values

    def _double(self) -> None:
        larger = np.zeros((len(self._keys) * 2, self._keys.shape[1]), np.uint64)
        values = np.zeros(len(self._values) * 2, np.uint32)
        for start in range(0, len(self._keys), _REHASHED_SLOTS):
            present = np.flatnonzero(self._keys[start : start + _REHASHED_SLOTS].any(axis=1)) + start
            slots, _ = _insert(larger, self._keys[present])
            if values.size:
                values[slots] = self._values[present]
        self._keys, self._values = larger, values


def _without_zero(keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    # Zero marks a free slot.
    zeros = ~keys.any(axis=1)
    if zeros.any():
        keys = keys.copy()
        keys[zeros] = 1
    return keys


def _slots(table: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Returns the slot of each key, or the first free one for it."""
    mask = len(table) - 1
    slots = (keys[:, 0] & np.uint64(mask)).astype(np.int64)
    searching = np.arange(len(keys))
    while searching.size:
        present = table[slots[searching]]
        searching = searching[~((present == keys[searching]).all(axis=1) | ~present.any(axis=1))]
        slots[searching] = (slots[searching] + 1) & mask
    return slots


def _insert(table: npt.NDArray[np.uint64], keys: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.int64], int]:
    """Inserts keys into a table with sufficient room; returns their slots and the number of new keys."""
    slots = np.zeros(len(keys), np.int64)
    waiting = np.arange(len(keys))
    new = 0
    while waiting.size:
        candidates = _slots(table, keys[waiting])
        free = ~table[candidates].any(axis=1)
        table[candidates[free]] = keys[waiting[free]]  # of several keys for one slot the last stays, the others go on
        placed = (table[candidates] == keys[waiting]).all(axis=1)
        new += int(np.count_nonzero(placed & free))
        slots[waiting[placed]] = candidates[placed]
        waiting = waiting[~placed]
    return slots, new
