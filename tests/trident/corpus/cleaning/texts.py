"""Random texts, and copies of them with some words exchanged."""

from __future__ import annotations

import random
from collections.abc import Sequence

_LETTERS = "abcdefghijklmnopqrstuvwxyz"


def vocabulary(count: int = 4000, seed: int = 1) -> list[str]:
    """Words that are none."""
    drawn = random.Random(seed)
    return sorted({"".join(drawn.choices(_LETTERS, k=drawn.randint(2, 9))) for _ in range(count)})


def random_text(drawn: random.Random, words: Sequence[str], length: int) -> str:
    """Words in random order, with a full stop now and then."""
    return " ".join(drawn.choice(words) + ("." if drawn.random() < 0.1 else "") for _ in range(length))


def mutated(drawn: random.Random, text: str, words: Sequence[str], changes: int) -> str:
    """The text with some words exchanged for others."""
    pieces = text.split()
    for place in drawn.sample(range(len(pieces)), changes):
        pieces[place] = drawn.choice(words)
    return " ".join(pieces)


def jaccard(first: str, second: str, length: int = 5) -> float:
    """The similarity of two texts: the share of runs of words that both have among those that one has."""
    sets = []
    for text in (first, second):
        words = text.replace(".", "").lower().split()
        sets.append({tuple(words[start : start + length]) for start in range(len(words) - length + 1)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


PROSE = random_text(random.Random(1), vocabulary(2000, seed=2), 120) + " and that is the end of it, to be sure."
