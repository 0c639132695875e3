"""The 64-bit Mersenne Twister of the C++ standard (`std::mt19937_64`), which NumPy does not have.

Source: Nishimura, "Tables of 64-bit Mersenne Twisters", ACM TOMACS 10 (4), 2000; ISO C++ [rand.predef].
"""

from __future__ import annotations

import numpy as np

_WORDS = 312
_MIDDLE = 156
_MULTIPLIER = 6364136223846793005
_LOW_BITS = np.uint64((1 << 31) - 1)
_MATRIX = np.uint64(0xB5026F5AA96619E9)
_MASK = (1 << 64) - 1


def mersenne_numbers(seed: int, count: int) -> np.ndarray:
    """The first numbers of the generator. Shapes: result uint64 [count]."""
    state = _first_state(seed)
    blocks = []
    for _ in range(-(-count // _WORDS)):
        _advance(state)
        blocks.append(_tempered(state))
    return np.concatenate([np.empty(0, np.uint64), *blocks])[:count]


def _first_state(seed: int) -> np.ndarray:
    words = [seed & _MASK]
    for place in range(1, _WORDS):
        words.append((_MULTIPLIER * (words[-1] ^ words[-1] >> 62) + place) & _MASK)
    return np.array(words, np.uint64)


def _advance(state: np.ndarray) -> None:
    """Replaces the words by the next ones. A word needs its successor, and one half the state further on."""
    for first, last, other in ((0, _MIDDLE, _MIDDLE), (_MIDDLE, _WORDS - 1, -_MIDDLE)):
        state[first:last] = _twisted(
            state[first:last], state[first + 1 : last + 1], state[first + other : last + other]
        )
    state[-1:] = _twisted(state[-1:], state[:1], state[_MIDDLE - 1 : _MIDDLE])


def _twisted(word: np.ndarray, successor: np.ndarray, other: np.ndarray) -> np.ndarray:
    mixed = (word & ~_LOW_BITS) | (successor & _LOW_BITS)
    return other ^ (mixed >> np.uint64(1)) ^ np.where(mixed & np.uint64(1), _MATRIX, np.uint64(0))


def _tempered(state: np.ndarray) -> np.ndarray:
    numbers = state ^ ((state >> np.uint64(29)) & np.uint64(0x5555555555555555))
    numbers ^= (numbers << np.uint64(17)) & np.uint64(0x71D67FFFEDA60000)
    numbers ^= (numbers << np.uint64(37)) & np.uint64(0xFFF7EEE000000000)
    return numbers ^ (numbers >> np.uint64(43))
