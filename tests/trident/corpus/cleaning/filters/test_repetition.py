"""Texts that repeat themselves."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.trident.corpus.cleaning.texts import PROSE
from trident.corpus.cleaning.documents.words import WordSplitter
from trident.corpus.cleaning.filters.repetition import GopherRepetition, _shares_of_runs

SPLITTER = WordSplitter()


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (PROSE, None),
        ("", None),
        ("one\n\ntwo\n\nthree\nfour", None),
        ("same\nsome words\nsame\nother things\nsame\n" + "\n".join(PROSE.split()[:12]), None),
        ("\n".join(["same", "same", "same", *PROSE.split()[:2]]), "repetition: lines"),
        ("\n".join([PROSE, PROSE, *"abcdef"]), "repetition: characters in repeated lines"),
        ("x\ny\n\nx\ny\n\nz\nw", "repetition: lines"),
        ("a\nb" + f"\n\n{PROSE[:100]}\nb\n\n{PROSE[:100]}\nc" + "\n\nd", "repetition: characters in repeated lines"),
        (" ".join(f"right now {word}" for word in PROSE.split()), "repetition: in the most frequent 2-grams"),
        (PROSE + " " + PROSE[:300], "repetition: in repeated 5-grams"),
    ],
)
def test_repetition(text: str, reason: str | None) -> None:
    rejection = GopherRepetition().rejections([text], SPLITTER.split([text]))[0]
    assert (rejection.reason if rejection else None) == reason


@settings(max_examples=100, deadline=None)
@given(st.lists(st.lists(st.sampled_from(["a", "bb", "ccc", "d"]), max_size=25), min_size=1, max_size=4))
def test_shares_are_those_of_a_plain_loop(documents: list[list[str]]) -> None:
    found = _shares_of_runs(SPLITTER.split([" ".join(document) for document in documents]))
    assert [length for length, _, _ in found] == list(range(2, 11))
    for length, _, shares in found:
        expected = [_share(document, length) for document in documents]
        assert shares.tolist() == pytest.approx(expected)


def _share(words: list[str], length: int) -> float:
    """The definition, word by word."""
    characters = sum(map(len, words))
    runs = [tuple(words[start : start + length]) for start in range(len(words) - length + 1)]
    if length < 5:
        counts = [(count, len("".join(run))) for run, count in Counter(runs).items() if count > 1]
        return min(1.0, max(counts, default=(0, 0))[0] * max(counts, default=(0, 0))[1] / max(1, characters))
    seen: set[tuple[str, ...]] = set()
    inside: set[int] = set()
    for start, run in enumerate(runs):
        if run in seen:
            inside.update(range(start, start + length))
        seen.add(run)
    return sum(len(words[place]) for place in inside) / max(1, characters)
