"""Queries check themselves, and whether a network can answer them."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import ConfigError, DataError
from megatron.tokenizers.tokenizer import build_tokenizer
from tests.helpers.vocabulary import write_vocabulary
from tests.trident.evaluate.fakes import EOD, ByteTokenizer
from trident.evaluate.scoring import Query, bounded_query, check_queries, continuation_query


def test_targets_are_the_tokens_from_the_first_target_on() -> None:
    assert Query((5, 6, 7, 8), 2).targets == (7, 8)


@pytest.mark.parametrize(("length", "first_target"), [(3, 0), (3, 3), (3, 4), (3, -1), (1, 0), (1, 1), (0, 0)])
def test_a_query_without_a_target_or_a_context_is_refused(length: int, first_target: int) -> None:
    with pytest.raises(ConfigError, match=rf"first_target {first_target} is out of range .* {length} tokens"):
        Query(tuple(range(length)), first_target)


def test_a_query_may_be_one_token_longer_than_the_network() -> None:
    check_queries([Query((1,) * 9, 1)], max_length=9, vocab_size=10)
    with pytest.raises(DataError, match="query 1 has 10 tokens, and the network has 8 positions"):
        check_queries([Query((1,) * 9, 1), Query((1,) * 10, 1)], max_length=9, vocab_size=10)


@pytest.mark.parametrize("token", [10, -1])
def test_an_unknown_token_is_refused(token: int) -> None:
    with pytest.raises(DataError, match=f"query 0 has the token {token}, and the vocabulary has 10 entries"):
        check_queries([Query((1, 9, token), 1)], max_length=9, vocab_size=10)


BYTES = ByteTokenizer()


@pytest.mark.parametrize(("context", "continuation"), [("The cat", " sat"), ("The cat ", "sat")])
def test_a_blank_belongs_to_the_continuation(context: str, continuation: str) -> None:
    query = continuation_query(BYTES, context, continuation, 33, "here")
    assert bytes(query.tokens) == b"The cat sat" and bytes(query.targets) == b" sat"


def test_a_token_across_the_border_belongs_to_the_continuation(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    whole, before = tokenizer.encode("return"), tokenizer.encode("retu")
    assert whole[: len(before)] != before  # "return" is a token of this vocabulary
    query = continuation_query(tokenizer, "a = 1; retu", "rn", 33, "here")
    assert tokenizer.decode(query.targets) == " return"


def test_the_tokens_are_those_of_the_whole_text(tmp_path: Path) -> None:
    tokenizer = build_tokenizer(write_vocabulary(tmp_path))
    query = continuation_query(tokenizer, "def choose(self", ", seq): return seq", 100, "here")
    assert list(query.tokens) == tokenizer.encode("def choose(self, seq): return seq")
    assert tokenizer.decode(query.targets) == ", seq): return seq"


def test_a_long_context_loses_its_beginning() -> None:
    query = continuation_query(BYTES, "a" * 20 + "bcd", " ef", 6, "here")
    assert bytes(query.tokens) == b"bcd ef" and bytes(query.targets) == b" ef"


@pytest.mark.parametrize("context", ["", " ", "\n"])
def test_without_a_context_the_end_of_a_document_stands_before(context: str) -> None:
    query = continuation_query(BYTES, context, "ab", 33, "here")
    assert query.tokens == (EOD, *context.encode(), *b"ab") and query.first_target == 1


def test_without_a_context_and_an_end_of_document_there_is_no_query() -> None:
    with pytest.raises(DataError, match="here: there is no context, and the tokenizer bytes has no end-of-document"):
        continuation_query(ByteTokenizer(has_eod=False), "", "ab", 33, "here")


def test_nothing_to_predict_is_refused() -> None:
    with pytest.raises(DataError, match="here: there is no token to predict"):
        continuation_query(BYTES, "abc", "", 33, "here")


def test_more_targets_than_positions_are_refused() -> None:
    assert len(bounded_query(BYTES, list(range(10)), 5, 6, "here").tokens) == 6
    with pytest.raises(DataError, match=r"here: 6 tokens must be predicted, but the network has 5 positions"):
        bounded_query(BYTES, list(range(10)), 4, 6, "here")
