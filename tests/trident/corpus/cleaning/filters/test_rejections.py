"""Filters of length: which texts they reject, and why."""

from __future__ import annotations

from pathlib import Path

from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import write_vocabulary
from trident.corpus.cleaning.documents.clean_options import LengthLimits
from trident.corpus.cleaning.filters.rejections import Rejection, length_filters

TEXTS = ["", "a b", "a b c d e"]


def test_characters_are_counted() -> None:
    (judge,) = length_filters(LengthLimits(minimum_characters=1, maximum_characters=8))
    assert judge(TEXTS) == [Rejection("too few characters", "0"), None, Rejection("too many characters", "9")]


def test_words_are_separated_by_whitespace() -> None:
    (judge,) = length_filters(LengthLimits(minimum_words=2, maximum_words=4))
    assert judge(TEXTS) == [Rejection("too few words", "0"), None, Rejection("too many words", "5")]


def test_tokens_are_counted_by_the_tokenizer(tmp_path: Path) -> None:
    choice = write_vocabulary(tmp_path)
    count = len(build_tokenizer(choice).encode(TEXTS[2]))
    (judge,) = length_filters(LengthLimits(minimum_tokens=1, maximum_tokens=count - 1, tokenizer=choice))
    assert judge(TEXTS) == [Rejection("too few tokens", "0"), None, Rejection("too many tokens", str(count))]


def test_units_without_a_limit_are_not_counted() -> None:
    assert list(length_filters(LengthLimits())) == []
