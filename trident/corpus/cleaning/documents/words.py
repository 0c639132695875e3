"""Splits texts into words and word runs, as arrays of hashes; vectorized, since a loop over megabytes takes seconds.

A word is a sequence of letters, digits, marks and underscores, in lower case; in scripts without spaces between words
(Chinese, Japanese, Thai, Lao, Khmer, Burmese) it is one character. All other characters separate words.

Source: rolling polynomial hashes, Karp and Rabin 1987, modulo 2^64 over random values of the characters.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Hashes = npt.NDArray[np.uint64]
Positions = npt.NDArray[np.int64]

_CODES = 0x110000
_CASED_CODES = 0x20000  # no plane above has cased letters, or anything but ideographs that forms words
_IDEOGRAPHIC_CODES = (0x20000, 0x40000)
_CHUNK_CHARACTERS = 1 << 18
_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64
_RUN_BASE = 0xC2B2AE3D27D4EB4F
_MODULUS = 1 << 64
_STANDS_ALONE = (
    (0x0E00, 0x0EFF),  # Thai, Lao
    (0x1000, 0x109F),  # Burmese
    (0x1780, 0x17FF),  # Khmer
    (0x3040, 0x30FF),  # Hiragana, Katakana
    (0x3400, 0x9FFF),  # ideographs
    (0xF900, 0xFAFF),
)


@dataclass(frozen=True)
class Words:
    """The words of several texts.

    Args:
        bounds: the words of text i go from bounds[i] to bounds[i + 1].

    Shapes:
        hashes: uint64 [w]; starts, ends: int64 [w], characters in the word's own text; bounds: int64 [texts + 1].
    """

    hashes: Hashes
    starts: Positions
    ends: Positions
    bounds: Positions

    def of(self, texts: Sequence[int]) -> Words:
        """Returns the words of some of the texts."""
        chosen = np.asarray(texts, np.int64)
        counts = np.diff(self.bounds)[chosen]
        bounds = np.concatenate((np.zeros(1, np.int64), np.cumsum(counts)))
        indices = np.arange(bounds[-1]) + np.repeat(self.bounds[chosen] - bounds[:-1], counts)
        return Words(self.hashes[indices], self.starts[indices], self.ends[indices], bounds)

    def runs(self, length: int) -> tuple[Hashes, npt.NDArray[np.bool_]]:
        """Returns a hash of the run of `length` words at each word, and False if the text has too few words left.

        Shapes:
            uint64 [w], bool [w].
        """
        hashes = np.zeros_like(self.hashes)
        factor = 1
        for step in range(min(length, len(hashes))):
            hashes[: len(hashes) - step] += self.hashes[step:] * np.uint64(factor)
            factor = factor * _RUN_BASE % _MODULUS
        left = np.repeat(self.bounds[1:], np.diff(self.bounds)) - np.arange(len(hashes))
        return mixed(hashes), left >= length

    def shingles(self, length: int) -> tuple[Hashes, Positions]:
        """Returns the runs of `length` words of each text; a shorter text is a single run.

        Returns:
            the hashes, uint64 [s], and the bounds of each text's runs, int64 [texts + 1].
        """
        hashes, fits = self.runs(length)
        counts = np.diff(self.bounds)
        short = (counts > 0) & (counts < length)
        if short.any():
            firsts = self.bounds[:-1][short]
            offset = np.arange(len(self.hashes)) - np.repeat(self.bounds[:-1], counts)
            powers = np.array([pow(_RUN_BASE, step, _MODULUS) for step in range(length)], np.uint64)
            terms = np.where(offset < length, self.hashes * powers[np.minimum(offset, length - 1)], np.uint64(0))
            sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)))
            hashes[firsts] = mixed(sums[self.bounds[1:][short]] - sums[firsts])
            fits[firsts] = True
        kept = np.concatenate((np.zeros(1, np.int64), np.cumsum(fits, dtype=np.int64)))
        return hashes[fits], kept[self.bounds]


class WordSplitter:
    """Finds the words of texts.

    Args:
        each_character: treat every letter and digit as a word, in every script.
    """

    def __init__(self, each_character: bool = False) -> None:
        self._values, self._alone = _character_tables()
        if each_character:
            self._alone = self._values != 0
        self._powers = _powers(_BASE)
        self._inverse_powers = _powers(pow(_BASE, -1, _MODULUS))

    def split(self, texts: Sequence[str]) -> Words:
        """Returns the words of all texts."""
        sizes = np.array([len(text) for text in texts], np.int64)
        begins = np.concatenate((np.zeros(1, np.int64), np.cumsum(sizes + 1)))
        words = [self._words(chunk, base) for base, chunk in _chunks("\n".join(texts))]
        empty = (np.zeros(0, np.uint64), np.zeros(0, np.int64), np.zeros(0, np.int64))
        hashes, starts, ends = (np.concatenate(parts) for parts in zip(*words, strict=True)) if words else empty
        bounds = np.searchsorted(starts, begins).astype(np.int64)
        text_starts = np.repeat(begins[:-1], np.diff(bounds))
        return Words(hashes, starts - text_starts, ends - text_starts, bounds)

    def _words(self, chunk: str, base: int) -> tuple[Hashes, Positions, Positions]:
        """Returns hashes, starts and ends of the words of a chunk that begins at character `base`."""
        codes = np.frombuffer(chunk.encode("utf-32-le", "surrogatepass"), np.uint32)
        values = self._values[codes]
        inside = np.zeros(len(codes) + 2, np.bool_)
        np.not_equal(values, 0, out=inside[1:-1])
        alone = np.zeros(len(codes) + 2, np.bool_)
        alone[1:-1] = self._alone[codes]
        joins = inside & ~alone
        starts = np.flatnonzero(inside[1:-1] & ~(joins[1:-1] & joins[:-2]))
        ends = np.flatnonzero(inside[1:-1] & ~(joins[1:-1] & joins[2:])) + 1
        sums = np.zeros(len(codes) + 1, np.uint64)
        np.cumsum(values * self._powers[: len(codes)], out=sums[1:])
        hashes = (sums[ends] - sums[starts]) * self._inverse_powers[starts]
        return mixed(hashes), starts + base, ends + base


def mixed(hashes: Hashes) -> Hashes:
    """Mixes all bits, bijectively.

    Source: the finalizer of splitmix64, Steele, Lea and Flood 2014, as corrected by Stafford (variant 13).
    """
    hashes = (hashes ^ (hashes >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    hashes = (hashes ^ (hashes >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return hashes ^ (hashes >> np.uint64(31))


def _chunks(text: str) -> Iterator[tuple[int, str]]:
    """Yields chunks of a text, which end after a space or newline if one is near, with their offsets."""
    start = 0
    while start < len(text):
        stop = start + _CHUNK_CHARACTERS
        if stop < len(text):
            near = max(text.rfind(" ", start, stop), text.rfind("\n", start, stop))
            stop = near + 1 if near > start else stop
        yield start, text[start:stop]
        start = stop


def _powers(base: int) -> Hashes:
    powers = np.full(_CHUNK_CHARACTERS, base, np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


def _character_tables() -> tuple[Hashes, npt.NDArray[np.bool_]]:
    """Returns a random value per character (equal for both cases, 0 for separators), and a mask of one-letter words."""
    characters = list(map(chr, range(_CASED_CODES)))
    in_words = np.fromiter(map(str.isalnum, characters), np.bool_, _CASED_CODES)
    in_words[ord("_")] = True
    for code in np.flatnonzero(~in_words).tolist():
        in_words[code] = unicodedata.category(characters[code])[0] == "M"
    lower = "".join(
        [character.lower()[0] for character in characters]
    )  # only U+0130 has two characters there, an i and a mark
    folded = np.zeros(_CODES, np.uint64)
    folded[:_CASED_CODES] = np.frombuffer(lower.encode("utf-32-le", "surrogatepass"), np.uint32) * in_words
    folded[slice(*_IDEOGRAPHIC_CODES)] = np.arange(*_IDEOGRAPHIC_CODES)
    alone = np.zeros(_CODES, np.bool_)
    for first, last in _STANDS_ALONE:
        alone[first : last + 1] = folded[first : last + 1] != 0
    alone[slice(*_IDEOGRAPHIC_CODES)] = True
    return np.where(folded == 0, np.uint64(0), mixed(folded * np.uint64(_BASE))), alone
