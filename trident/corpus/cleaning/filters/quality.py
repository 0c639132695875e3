"""Heuristics that separate prose from lists, menus and noise.

Source: Rae et al. 2021, Scaling Language Models: Methods, Analysis & Insights from Training Gopher, appendix A1.1
(quality filtering); words are separated by spaces.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from trident.corpus.cleaning.filters.rejections import Rejection

_WORDS = (50, 100_000)
_MEAN_WORD_CHARACTERS = (3.0, 10.0)
_MOST_SYMBOLS_A_WORD = 0.1
_MOST_BULLET_LINES = 0.9
_MOST_ELLIPSIS_LINES = 0.3
_LEAST_WORDS_WITH_LETTER = 0.8
_STOP_WORDS = frozenset({"the", "be", "to", "of", "and", "that", "have", "with"})
_BULLETS = ("•", "‣", "-", "*", "–", "◦", "▪")
_ELLIPSES = ("...", "…")
_LETTER = re.compile(r"[^\W\d_]")


class GopherQuality:
    """Drops texts that violate one of seven rules.

    Args:
        minimum_stop_words: required number of eight frequent English words; 0 for other languages.
    """

    def __init__(self, minimum_stop_words: int) -> None:
        self._minimum_stop_words = minimum_stop_words

    def rejections(self, texts: Sequence[str]) -> list[Rejection | None]:
        """Returns a rejection for each text, None if it is kept."""
        return [self._fault(text) for text in texts]

    def _fault(self, text: str) -> Rejection | None:
        words = text.split()
        count = len(words)
        if not _WORDS[0] <= count <= _WORDS[1]:
            return Rejection("quality: number of words", str(count))
        mean = sum(map(len, words)) / count
        if not _MEAN_WORD_CHARACTERS[0] <= mean <= _MEAN_WORD_CHARACTERS[1]:
            return Rejection("quality: mean word length", f"{mean:.2f}")
        for name, symbols in (("hashes", text.count("#")), ("ellipses", sum(map(text.count, _ELLIPSES)))):
            if symbols > _MOST_SYMBOLS_A_WORD * count:
                return Rejection(f"quality: {name} a word", f"{symbols / count:.2f}")
        lines = [line.strip() for line in text.split("\n") if line.strip()]
        bullets = sum(line.startswith(_BULLETS) for line in lines) / len(lines)
        if bullets > _MOST_BULLET_LINES:
            return Rejection("quality: lines with a bullet", f"{bullets:.2f}")
        ellipses = sum(line.endswith(_ELLIPSES) for line in lines) / len(lines)
        if ellipses > _MOST_ELLIPSIS_LINES:
            return Rejection("quality: lines with an ellipsis", f"{ellipses:.2f}")
        with_letter = sum(word.isalpha() or _LETTER.search(word) is not None for word in words) / count
        if with_letter < _LEAST_WORDS_WITH_LETTER:
            return Rejection("quality: words with a letter", f"{with_letter:.2f}")
        if self._minimum_stop_words:
            stop_words = len(_STOP_WORDS.intersection(map(str.lower, words)))
            if stop_words < self._minimum_stop_words:
                return Rejection("quality: stop words", str(stop_words))
        return None
