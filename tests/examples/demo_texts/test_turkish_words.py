"""The word lists: every entry is a word of which forms can be made, and none comes twice."""

from __future__ import annotations

import pytest

from examples.demo_texts import turkish_words as words
from examples.demo_texts.turkish_grammar import Word

LISTS = [name for name in vars(words) if name.isupper()]
LETTERS = set("abcçdefgğhıijklmnoöprsştuüvyzâ")


@pytest.mark.parametrize("name", LISTS)
def test_no_entry_comes_twice(name: str) -> None:
    entries = list(getattr(words, name))
    assert len(set(entries)) == len(entries) >= 5


@pytest.mark.parametrize("name", ["PLACES", "THINGS", "ANIMALS", "VERBS_WITH_OBJECT", "VERBS_OF_REST", "NUMBERS"])
def test_entries_are_turkish_and_stems_differ_in_their_end_only(name: str) -> None:
    for entry in getattr(words, name):
        word = Word.of(entry)
        assert set(word.bare + word.before_vowel) - {" "} <= LETTERS
        assert word.bare[0] == word.before_vowel[0] and abs(len(word.bare) - len(word.before_vowel)) <= 1


def test_all_letters_of_the_alphabet_and_both_letters_i_are_used() -> None:
    text = " ".join(" ".join(getattr(words, name)) for name in LISTS)
    assert set("ıİIiğşçöüŞÇÖÜ") < set(text)
    assert all(plate.isdigit() and len(plate) == 2 for _, plate in words.CITIES.values())
