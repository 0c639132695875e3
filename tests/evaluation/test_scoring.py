"""Queries check themselves, and whether a network can answer them."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError, DataError
from megatron.evaluation.scoring import Query, check_queries


def test_targets_are_the_tokens_from_the_first_target_on() -> None:
    assert Query((5, 6, 7, 8), 2).targets == (7, 8)


@pytest.mark.parametrize(("length", "first_target"), [(3, 0), (3, 3), (3, 4), (3, -1), (1, 0), (1, 1), (0, 0)])
def test_a_query_without_a_target_or_a_context_is_refused(length: int, first_target: int) -> None:
    with pytest.raises(ConfigError, match=f"first_target {first_target} is not a target of a query of {length} tokens"):
        Query(tuple(range(length)), first_target)


def test_a_query_may_be_one_token_longer_than_the_network() -> None:
    check_queries([Query((1,) * 9, 1)], max_length=9, vocab_size=10)
    with pytest.raises(DataError, match="query 1 has 10 tokens, and the network has 8 positions"):
        check_queries([Query((1,) * 9, 1), Query((1,) * 10, 1)], max_length=9, vocab_size=10)


@pytest.mark.parametrize("token", [10, -1])
def test_an_unknown_token_is_refused(token: int) -> None:
    with pytest.raises(DataError, match=f"query 0 has the token {token}, and the vocabulary has 10 entries"):
        check_queries([Query((1, 9, token), 1)], max_length=9, vocab_size=10)
