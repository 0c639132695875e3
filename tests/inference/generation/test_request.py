"""Requests: what is refused, and the way over the network."""

from __future__ import annotations

import json

import pytest

from megatron.errors import ConfigError
from megatron.inference.generation import Completion, GeneratedToken, Request
from megatron.inference.sampling import Sampling

SAMPLING = Sampling(temperature=0.5, top_k=3, logit_bias=((4, -2.0),), seed=8)


def test_requests_that_make_no_sense() -> None:
    with pytest.raises(ConfigError, match="prompt of request a has no tokens"):
        Request("a", (), 3, SAMPLING)
    with pytest.raises(ConfigError, match="max_new_tokens of request a is 0"):
        Request("a", (1,), 0, SAMPLING)
    with pytest.raises(ConfigError, match="top_logprobs of request a is -1"):
        Request("a", (1,), 3, SAMPLING, top_logprobs=-1)


def test_a_request_arrives_as_it_was_sent() -> None:
    sent = Request("a", (1, 2), 3, SAMPLING, sample=7, stop_ids=frozenset({5, 6}), top_logprobs=2)
    assert Request.of_json(json.loads(json.dumps(sent.to_json()))) == sent


def test_the_stop_token_is_not_part_of_the_text() -> None:
    request = Request("a", (1,), 3, SAMPLING)
    first, last = GeneratedToken("a", 4, -0.5, ((4, -0.5),)), GeneratedToken("a", 9, -1.0, (), "stop")
    stopped = Completion.of(request, [first, last])
    assert (stopped.tokens, stopped.logprobs, stopped.top, stopped.finish) == ((4,), (-0.5,), (((4, -0.5),),), "stop")
    cancelled = Completion.of(request, [first, GeneratedToken("a", None, finish="cancelled")])
    assert (cancelled.tokens, cancelled.finish) == ((4,), "cancelled")
