"""Unigram vocabularies: deterministic, with bytes for everything else, and clear refusals."""

from __future__ import annotations

import json

import pytest

from megatron.errors import ConfigError, DataError
from trident.corpus.vocabulary.unigram import train_unigram

pytest.importorskip("sentencepiece")
TEXTS = ["the quick brown fox jumps over the lazy dog. " * 20, "pack my box with five dozen liquor jugs\n" * 20]


def test_the_same_text_gives_the_same_files() -> None:
    first, second = (train_unigram(TEXTS, 400, ("<s>", "<own>")) for _ in range(2))
    assert first == second and set(first) == {".model", "-tokenizer.json"}
    added = json.loads(first["-tokenizer.json"])["added_tokens"]
    assert [(token["id"], token["content"]) for token in added] == [(0, "<s>"), (1, "<own>"), (2, "<unk>"), (3, "</s>")]


def test_no_text_is_an_error() -> None:
    with pytest.raises(DataError, match="The input has no text to learn from"):
        train_unigram(["", " \n "], 400)


def test_a_vocabulary_too_small_for_the_characters_is_reported() -> None:
    with pytest.raises(ConfigError, match="--vocab-size 50 with 3 special tokens does not work for this text"):
        train_unigram(TEXTS, 50)
