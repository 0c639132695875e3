"""Whole texts: their order, and that nothing is generated if one cannot be."""

from __future__ import annotations

import pytest

from megatron.errors import ConfigError
from megatron.inference.generation import Request, completions, generate_all, recompute
from tests.inference.networks import GREEDY, load, mixed_requests


def test_texts_come_in_the_order_of_their_requests() -> None:
    requests = [Request(str(number), (number,), 9 - number, GREEDY) for number in range(5)]
    found = list(completions(load(), requests, max_sequences=3))
    assert [one.request for one in found] == requests
    assert [len(one.tokens) for one in found] == [9, 8, 7, 6, 5]
    assert generate_all(load(), []) == []


def test_one_wrong_request_stops_all_before_the_first_step() -> None:
    wrong = Request("wrong", (1,) * 16, 1, GREEDY)
    with pytest.raises(ConfigError, match="request wrong has 16 tokens"):
        next(completions(load(), [*mixed_requests(2), wrong]))
    with pytest.raises(ConfigError, match="request wrong has 16 tokens"):
        recompute(load(), wrong)


def test_recomputing_gives_the_same_answer() -> None:
    request = Request("a", (3, 1), 20, GREEDY, top_logprobs=1)
    (cached,), slow = generate_all(load(), [request]), recompute(load(), request)
    assert (cached.tokens, cached.finish) == (slow.tokens, slow.finish) and len(slow.tokens) == 14
    assert cached.logprobs == pytest.approx(slow.logprobs, abs=1e-4)
