"""Detects repetitive texts: repeated lines, paragraphs and word runs.

Source: Rae et al. 2021, Scaling Language Models: Methods, Analysis & Insights from Training Gopher, table A1. Its
ambiguities are resolved as follows: the first of several equal lines, paragraphs or runs is not a repetition; words are
as in `WordSplitter`; the share of runs in a text counts only the characters of words.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from trident.corpus.cleaning.documents.words import Hashes, Words, mixed
from trident.corpus.cleaning.filters.rejections import Rejection

_MOST_REPEATED_PARTS = 0.30
_MOST_REPEATED_PART_CHARACTERS = 0.20
_MOST_IN_TOP_RUN = {2: 0.20, 3: 0.18, 4: 0.16}
_MOST_IN_REPEATED_RUNS = {5: 0.15, 6: 0.14, 7: 0.13, 8: 0.12, 9: 0.11, 10: 0.10}


class GopherRepetition:
    """Drops texts with too much repetition."""

    def rejections(self, texts: Sequence[str], words: Words) -> list[Rejection | None]:
        """Returns a rejection for each text, None if it is kept.

        Args:
            words: of the texts.
        """
        rejections = [_repeated_parts(text) for text in texts]
        for length, most, shares in _shares_of_runs(words):
            kind = "in the most frequent" if length in _MOST_IN_TOP_RUN else "in repeated"
            for number in np.flatnonzero(shares > most).tolist():
                rejections[number] = rejections[number] or Rejection(
                    f"repetition: {kind} {length}-grams", f"{shares[number]:.2f}"
                )
        return rejections


def _repeated_parts(text: str) -> Rejection | None:
    for name, separator in (("lines", "\n"), ("paragraphs", "\n\n")):
        parts = [part.strip() for part in text.split(separator)]
        parts = [part for part in parts if part]
        different = set(parts)
        if len(different) == len(parts):
            continue
        share = 1 - len(different) / len(parts)
        if share > _MOST_REPEATED_PARTS:
            return Rejection(f"repetition: {name}", f"{share:.2f}")
        characters = sum(map(len, parts))
        share = 1 - sum(map(len, different)) / characters
        if share > _MOST_REPEATED_PART_CHARACTERS:
            return Rejection(f"repetition: characters in repeated {name}", f"{share:.2f}")
    return None


def _shares_of_runs(words: Words) -> list[tuple[int, float, npt.NDArray[np.float64]]]:
    """Returns, for each length of runs, the allowed share and the share of each text's characters in such runs."""
    counts = np.diff(words.bounds)
    texts = np.repeat(np.arange(len(counts)), counts)
    salt = mixed(np.arange(1, len(counts) + 1, dtype=np.uint64))[texts]
    sums = np.concatenate((np.zeros(1, np.int64), np.cumsum(words.ends - words.starts)))
    whole = np.maximum(np.diff(sums[words.bounds]), 1)
    shares = []
    for length, most in _MOST_IN_TOP_RUN.items():
        runs, fits = words.runs(length)
        shares.append((length, most, _in_top_run(runs ^ salt, np.flatnonzero(fits), length, texts, sums, whole)))
    among = np.arange(len(texts))
    for length, most in _MOST_IN_REPEATED_RUNS.items():
        runs, fits = words.runs(length)
        among = among[fits[among]]
        among, again = _grouped(runs ^ salt, among)
        covered = np.zeros(len(texts) + 1, np.int64)
        np.add.at(covered, among[again], 1)
        np.add.at(covered, among[again] + length, -1)
        inside = np.cumsum(covered[:-1]) > 0
        characters = np.bincount(texts[inside], (words.ends - words.starts)[inside], len(counts))
        shares.append((length, most, characters / whole))
        # A longer run occurs twice only where its beginning does.
        twice = again.copy()
        twice[:-1] |= again[1:]
        among = np.sort(among[twice])
    return shares


def _in_top_run(
    runs: Hashes,
    among: npt.NDArray[np.intp],
    length: int,
    texts: npt.NDArray[np.intp],
    sums: npt.NDArray[np.int64],
    whole: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """Returns the share of each text's most frequent run; 0 if no run occurs twice."""
    ordered, again = _grouped(runs, among)
    starts = np.flatnonzero(~again)
    counts = np.diff(np.append(starts, len(ordered)))
    firsts = ordered[starts[counts > 1]]
    counts = counts[counts > 1]
    characters = sums[firsts + length] - sums[firsts]
    order = np.lexsort((characters, counts, texts[firsts]))
    shares = np.zeros(len(whole))
    shares[texts[firsts[order]]] = (counts * characters)[order]  # the last of a text is its most frequent
    return np.minimum(shares / whole, 1.0)


def _grouped(runs: Hashes, among: npt.NDArray[np.intp]) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.bool_]]:
    """Returns positions sorted by run, and a mask of the positions with the same run as the previous one."""
    # Sorts numbers with the run's hash in the high and the position in the low bits, many times faster than an argsort
    # by hash. With 10^5 words 47 bits of the hash are left: a collision is rare and has a negligible effect.
    low = np.uint64((1 << len(runs).bit_length()) - 1)
    ordered = np.sort((runs[among] & ~low) | among.astype(np.uint64))
    again = np.zeros(len(ordered), np.bool_)
    np.equal(ordered[1:] & ~low, ordered[:-1] & ~low, out=again[1:])
    return (ordered & low).astype(np.intp), again
