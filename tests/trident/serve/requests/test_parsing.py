"""The common fields of completion and chat requests."""

from __future__ import annotations

import math
from typing import Any

import pytest

from megatron.inference.sampling import Sampling
from trident.serve.requests import parsing
from trident.serve.requests.json_fields import JsonFields
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.parsing import GenerationRequest
from trident.serve.requests.refusals import Refusal
from trident.serve.requests.served_model import ServedModel

LIMITS = ServerLimits(sequences=6, stop_texts=2, stop_letters=4)


def test_the_engines_requests_cover_every_choice_of_every_prompt() -> None:
    request = GenerationRequest(
        ((1, 2), (3,)), ("", ""), 2, (5, 6), Sampling(seed=9), (), frozenset([7]), top_logprobs=3
    )
    requests = request.requests("cmpl-x")
    assert [request.id for request in requests] == [f"cmpl-x/{place}" for place in range(4)]
    assert [request.prompt for request in requests] == [(1, 2), (1, 2), (3,), (3,)]
    assert [request.max_new_tokens for request in requests] == [5, 5, 6, 6]
    assert [request.sample for request in requests] == [0, 1, 2, 3]
    assert {(request.top_logprobs, request.stop_ids) for request in requests} == {(3, frozenset([7]))}
    assert request.prompt_tokens == 3 and request.sequences == 4


def test_another_model_is_not_found(served: ServedModel) -> None:
    parsing.check_model(JsonFields({}), served)
    parsing.check_model(JsonFields({"model": "tiny"}), served)
    with pytest.raises(Refusal, match="'gpt-4' is not served here, only 'tiny' is") as caught:
        parsing.check_model(JsonFields({"model": "gpt-4"}), served)
    assert (caught.value.status, caught.value.code) == (404, "model_not_found")


def test_sampling_has_the_names_of_openai_and_ours(served: ServedModel) -> None:
    given = {"temperature": 0.5, "top_p": 0.9, "top_k": 5, "min_p": 0.1, "seed": 3, "logit_bias": {"4": -100}}
    given |= {"repetition_penalty": 1.1, "frequency_penalty": 0.2, "presence_penalty": -0.3, "typical_p": 0.95}
    found = parsing.read_sampling(JsonFields(given), served)
    assert found == Sampling(**{**given, "logit_bias": ((4, -100.0),)})


def test_top_p_0_takes_the_most_probable_token_as_with_openai(served: ServedModel) -> None:
    for zero in (0, 0.0):
        found = parsing.read_sampling(JsonFields({"top_p": zero, "temperature": 1.5}), served)
        assert found.is_greedy and not Sampling(top_p=0.0).is_greedy
    assert not parsing.read_sampling(JsonFields({"top_p": 0.001}), served).is_greedy
    assert not parsing.read_sampling(JsonFields({}), served).is_greedy


def test_without_a_seed_every_request_has_its_own(served: ServedModel) -> None:
    seeds = {parsing.read_sampling(JsonFields({}), served).seed for _ in range(20)}
    assert len(seeds) == 20


@pytest.mark.parametrize(
    ("values", "says", "parameter"),
    [
        ({"temperature": -1}, "'temperature' is -1, but must be from 0 to 2", "temperature"),
        ({"temperature": 2.5}, r"'temperature' is 2\.5, but must be from 0 to 2", "temperature"),
        ({"temperature": 3e38}, "'temperature' is 3e\\+38, but must be from 0 to 2", "temperature"),
        ({"temperature": "1"}, "'temperature' must be a number, not the text '1'", "temperature"),
        ({"top_p": "0.5"}, r"top_p must be a number, not '0\.5'", "top_p"),
        ({"min_p": "0"}, "min_p must be a number, not '0'", "min_p"),
        ({"top_k": math.inf}, "'top_k' is a number too large to be used", "top_k"),
        ({"seed": -math.inf}, "'seed' is a number too large to be used", "seed"),
        ({"top_p": 1.5}, "top_p 1.5", "top_p"),
        ({"frequency_penalty": 3}, "frequency_penalty 3", "frequency_penalty"),
        ({"seed": 1 << 70}, "seed", "seed"),
        ({"logit_bias": {"4": 101}}, "logit_bias 101", "logit_bias"),
        ({"logit_bias": {"x": 1}}, "logit_bias .*x", "logit_bias"),
        ({"logit_bias": {"600": 1}}, "'logit_bias' has token 600, but the last one is 599", "logit_bias"),
    ],
)
def test_wrong_sampling_is_refused(served: ServedModel, values: dict[str, Any], says: str, parameter: str) -> None:
    with pytest.raises(Refusal, match=says) as caught:
        parsing.read_sampling(JsonFields(values), served)
    assert (caught.value.status, caught.value.parameter) == (400, parameter)


def test_stop_is_a_text_or_several() -> None:
    assert parsing.read_stop(JsonFields({}), LIMITS) == ()
    assert parsing.read_stop(JsonFields({"stop": "ab"}), LIMITS) == ("ab",)
    assert parsing.read_stop(JsonFields({"stop": ["a", "b"]}), LIMITS) == ("a", "b")
    for value, says in (("", "0 letters"), ("abcde", "5 letters"), (["a"] * 3, "3 entries"), ([1], "must be a text")):
        with pytest.raises(Refusal, match=says):
            parsing.read_stop(JsonFields({"stop": value}), LIMITS)


def test_streaming_and_its_options() -> None:
    assert parsing.read_streaming(JsonFields({})) == (False, False)
    assert parsing.read_streaming(JsonFields({"stream": True, "stream_options": {"include_usage": True}})) == (
        True,
        True,
    )
    for values, says in (
        ({"stream_options": {"include_usage": True}}, "is only for requests with stream true"),
        ({"stream": True, "stream_options": 3}, "must be an object"),
        ({"stream": True, "stream_options": {"x": 1}}, r"'stream_options\.x' is not a field"),
    ):
        with pytest.raises(Refusal, match=says):
            parsing.read_streaming(JsonFields(values))


def test_choices_are_counted_over_all_prompts() -> None:
    assert parsing.read_choices(JsonFields({"n": 2}), 3, LIMITS) == 2
    with pytest.raises(Refusal, match="'n' is 2 for each of 4 prompts, but one request may have 6 answers"):
        parsing.read_choices(JsonFields({"n": 2}), 4, LIMITS)
    with pytest.raises(Refusal, match="'n' is 7, but must be from 1 to 6"):
        parsing.read_choices(JsonFields({"n": 7}), 1, LIMITS)


def test_fields_without_effect_are_accepted() -> None:
    fields = JsonFields({"user": "me", "metadata": {}, "store": False, "service_tier": "auto"})
    parsing.refuse_rest(fields, {})
    fields.finish()
    with pytest.raises(Refusal, match="'store' is not supported here: nothing is stored"):
        parsing.refuse_rest(JsonFields({"store": True}), {})


def test_prompts_of_tokens_must_be_of_the_vocabulary() -> None:
    assert parsing.token_list([0, 599], "prompt", 600) == (0, 599)
    for value, says in (([], "that is not empty"), ("a", "list of token ids"), ([600], "holds 600"), ([True], "True")):
        with pytest.raises(Refusal, match=says):
            parsing.token_list(value, "prompt", 600)
