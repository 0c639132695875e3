"""Words, runs and shingles as arrays are those that a plain loop finds."""

from __future__ import annotations

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trident.corpus.cleaning.documents import words as words_module
from trident.corpus.cleaning.documents.words import Words, WordSplitter

_ALONE = "\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u9fff\uf900-\ufaff\U00020000-\U0003ffff"
_MARKS = "\u0300-\u036f\u0900-\u0903\u093a-\u094f"
_WORD = re.compile(rf"[{_ALONE}]|(?:(?![{_ALONE}])[\w{_MARKS}])+")
TEXTS = st.lists(st.text(st.sampled_from("abAB é_9İß.,-\n\t漢字かสวк\u0301हि😀"), max_size=30), max_size=6)
SPLITTER = WordSplitter()


def spans(words: Words, text: int) -> list[tuple[int, int]]:
    low, high = words.bounds[text], words.bounds[text + 1]
    return list(zip(words.starts[low:high].tolist(), words.ends[low:high].tolist(), strict=True))


@settings(max_examples=200, deadline=None)
@given(TEXTS, st.sampled_from([1, 3, 7, 1 << 18]))
def test_words_are_those_of_a_plain_loop(texts: list[str], chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(words_module, "_CHUNK_CHARACTERS", max(chunk, 32))
        found = SPLITTER.split(texts)
    for number, text in enumerate(texts):
        assert spans(found, number) == [match.span() for match in _WORD.finditer(text)]
    assert found.bounds[-1] == len(found.hashes)


def test_a_hash_is_of_the_word_without_case_wherever_it_stands() -> None:
    found = SPLITTER.split(["One two, ONE! trés", "x" * 1000 + " one  TRÉS two " + "y" * 300_000 + " one"])
    first, second = found.hashes[:4].tolist(), found.hashes[4:].tolist()
    assert first[0] == first[2] == second[1] == second[-1]
    assert first[1] == second[3] and first[3] == second[2]
    assert len(set(first + second)) == 6  # a word of more letters than a chunk has is cut


def test_words_in_different_order_and_anagrams_differ() -> None:
    found = SPLITTER.split(["abc acb bac bca cab cba a aa aaa aaaa ab ba", "one two three", "two one three"])
    assert len(set(found.hashes[:12].tolist())) == 12
    runs, fits = found.runs(2)
    assert len(set(runs[12:][fits[12:]].tolist())) == 4


@settings(max_examples=150, deadline=None)
@given(st.lists(st.lists(st.sampled_from("abc"), max_size=7), min_size=1, max_size=5), st.integers(1, 5))
def test_shingles_are_the_runs_of_words(documents: list[list[str]], length: int) -> None:
    hashes, bounds = SPLITTER.split([" ".join(document) for document in documents]).shingles(length)
    meaning: dict[int, tuple[str, ...]] = {}
    for number, document in enumerate(documents):
        size = min(length, len(document))
        runs = [tuple(document[start : start + size]) for start in range(len(document) - size + 1) if size]
        own = hashes[bounds[number] : bounds[number + 1]].tolist()
        assert len(own) == len(runs)
        assert all(meaning.setdefault(value, run) == run for value, run in zip(own, runs, strict=True))
    assert len(set(meaning.values())) == len(meaning)


def test_each_character_may_be_a_word() -> None:
    found = WordSplitter(each_character=True).split(["Ab, ba"])
    assert spans(found, 0) == [(0, 1), (1, 2), (4, 5), (5, 6)]
    assert found.hashes[0] == found.hashes[3] != found.hashes[1]
    assert np.array_equal(WordSplitter().split(["a"]).hashes, found.hashes[:1])
