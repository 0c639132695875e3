"""Filters of length and language: which texts they reject, and why."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.corpus.cleaning.documents.clean_options import LengthLimits
from megatron.corpus.cleaning.filters.rejections import (
    CharacterCount,
    LanguageCheck,
    Rejection,
    TokenCount,
    WordCount,
)
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import write_vocabulary

TEXTS = ["", "a b", "a b c d e"]


def test_characters_are_counted() -> None:
    found = CharacterCount(LengthLimits(minimum_characters=1, maximum_characters=8)).rejections(TEXTS)
    assert found == [Rejection("too few characters", "0"), None, Rejection("too many characters", "9")]


def test_words_are_separated_by_whitespace() -> None:
    found = WordCount(LengthLimits(minimum_words=2, maximum_words=4)).rejections(TEXTS)
    assert found == [Rejection("too few words", "0"), None, Rejection("too many words", "5")]


def test_tokens_are_counted_by_the_tokenizer(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    count = len(build_tokenizer(choice).encode(TEXTS[2]))
    found = TokenCount(LengthLimits(minimum_tokens=1, maximum_tokens=count - 1, tokenizer=choice)).rejections(TEXTS)
    assert found == [Rejection("too few tokens", "0"), None, Rejection("too many tokens", str(count))]


@pytest.mark.parametrize(("fault", "rejection"), [(None, None), ("de 0.99", Rejection("language", "de 0.99"))])
def test_a_language_failure_is_a_rejection(fault: str | None, rejection: Rejection | None) -> None:
    class Languages:
        def fault(self, text: str) -> str | None:
            return fault

    assert LanguageCheck(Languages()).rejections(["x"]) == [rejection]  # type: ignore[arg-type]
