"""`/v1/completions` as OpenAI's client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from megatron.inference.sampling import Sampling
from tests.trident.serve.fakes import POSITIONS, WRONG_TOKEN, FakeEngine, Running, running, saying
from trident.serve.completions import CompletionForm
from trident.serve.execution.answer_text import AnswerDelta, TokenRecord
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.parsing import GenerationRequest
from trident.serve.requests.served_model import ServedModel


def talk(
    served: ServedModel,
    act: Callable[[Running], Awaitable[Any]],
    engine: FakeEngine | None = None,
    limits: ServerLimits | None = None,
) -> Any:
    """Runs `act` with a service; returns its result."""

    async def whole() -> Any:
        async with running(served, engine, limits) as service:
            return await act(service)

    return asyncio.run(whole())


def test_a_prompt_is_a_text_texts_tokens_or_lists_of_tokens(served: ServedModel) -> None:
    engine = FakeEngine(saying(served.tokenizer, "the answer"))
    ids = served.tokenizer.encode("one two")

    async def act(service: Running) -> list[Any]:
        create = service.client.completions.create
        prompts: list[Any] = ["one two", ["one two", "b"], ids, [ids, [5]], ""]
        return [await create(model="tiny", prompt=prompt, max_tokens=20) for prompt in prompts]

    answers = talk(served, act, engine)
    assert [[choice.text for choice in answer.choices] for answer in answers] == [
        ["the answer"] * count for count in (1, 2, 1, 2, 1)
    ]
    asked = [request.prompt for request in engine.requests]
    b = tuple(served.tokenizer.encode("b"))
    assert asked == [tuple(ids), tuple(ids), b, tuple(ids), tuple(ids), (5,), (served.eod_id,)]
    assert len({answer.id for answer in answers}) == 5 and answers[0].id.startswith("cmpl-")
    length = len(served.tokenizer.encode("the answer")) + 1
    assert answers[0].usage.model_dump(exclude_none=True) == {
        "prompt_tokens": len(ids), "completion_tokens": length, "total_tokens": len(ids) + length,
    }  # fmt: skip
    assert (answers[0].object, answers[0].model, answers[0].system_fingerprint) == (
        "text_completion",
        "tiny",
        "fp_test",
    )


def test_settings_reach_the_engine(served: ServedModel) -> None:
    engine = FakeEngine()

    async def act(service: Running) -> Any:
        return await service.client.completions.create(
            model="tiny", prompt="a", n=3, max_tokens=4, temperature=0.5, top_p=0.9, seed=11, presence_penalty=0.5,
            frequency_penalty=-0.5, logit_bias={"7": -100}, user="me",
            extra_body={"top_k": 9, "min_p": 0.05, "repetition_penalty": 1.5},
        )  # fmt: skip

    answer = talk(served, act, engine)
    assert [choice.index for choice in answer.choices] == [0, 1, 2] and answer.choices[0].finish_reason == "length"
    sampling = engine.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.9, 9, 0.05)
    assert (sampling.presence_penalty, sampling.frequency_penalty, sampling.repetition_penalty) == (0.5, -0.5, 1.5)
    assert sampling.logit_bias == ((7, -100.0),) and sampling.seed == 11
    assert [(request.sample, request.max_new_tokens) for request in engine.requests] == [(0, 4), (1, 4), (2, 4)]


def test_the_stream_adds_up_to_the_answer_at_once(served: ServedModel) -> None:
    settings: dict[str, Any] = {
        "model": "tiny",
        "prompt": ["a", "b"],
        "n": 2,
        "max_tokens": 30,
        "seed": 1,
        "logprobs": 2,
    }

    async def act(service: Running) -> tuple[Any, list[Any]]:
        whole = await service.client.completions.create(**settings)
        options = {"include_usage": True}
        stream = await service.client.completions.create(**settings, stream=True, stream_options=options)
        return whole, [chunk async for chunk in stream]

    whole, chunks = talk(served, act)
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == [] and len({chunk.id for chunk in chunks}) == 1
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert "".join(part.text for part in parts) == choice.text
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason] == ["length"]
        for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
            streamed = [value for part in parts for value in getattr(part.logprobs, name)]
            assert streamed == getattr(choice.logprobs, name)
        assert len(choice.logprobs.tokens) == 30 and set(choice.logprobs.token_logprobs) == {-0.25}


def test_the_parts_of_characters_are_distinguished(served: ServedModel) -> None:
    """Their texts are all U+FFFD; the keys of the alternatives are their bytes."""
    numbers = range(served.vocab_size)
    broken = [number for number in numbers if served.tokenizer.decode([number]) == "\ufffd"][:3]
    whole = [(number, -float(place)) for place, number in enumerate([*broken, 5, 5])]
    form = CompletionForm(
        GenerationRequest((), ("",), 1, (), Sampling(), (), frozenset(), top_logprobs=5), served, "x", 0
    )
    found = form.whole([AnswerDelta("", (TokenRecord(broken[0], -1.0, tuple(whole), 0),))], {})["choices"][0][
        "logprobs"
    ]
    labels = [f"bytes:\\x{(served.token_bytes(number) or b'?')[0]:02x}" for number in broken]
    assert found["tokens"] == labels[:1]
    assert found["top_logprobs"] == [{**{label: -float(n) for n, label in enumerate(labels)}, served.token_text(5): -3}]


def test_stop_texts_end_the_answer_and_the_computing(served: ServedModel) -> None:
    engine = FakeEngine(saying(served.tokenizer, "one two STOP " + "three " * 20), step_seconds=0.005)

    async def act(service: Running) -> Any:
        answer = await service.client.completions.create(model="tiny", prompt="a", max_tokens=100, stop=["STOP", "§"])
        await service.settle()
        return answer

    answer = talk(served, act, engine)
    assert answer.choices[0].text == "one two " and answer.choices[0].finish_reason == "stop"
    assert len(engine.cancelled) == 1 and answer.usage.completion_tokens < 20


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("new_tokens", [0, 1, 3])
def test_echo_with_logprobs_shows_those_of_the_prompt(served: ServedModel, streams: bool, new_tokens: int) -> None:
    """Texts and offsets are of the whole; the first token has no log-probability."""
    prompts, engine = ["some text", "a🦜"], FakeEngine()
    ids = [served.tokenizer.encode(prompt) for prompt in prompts]

    async def act(service: Running) -> tuple[list[str], list[dict[str, list[Any]]], Any]:
        settings: dict[str, Any] = {"model": "tiny", "prompt": prompts, "echo": True, "logprobs": 2}
        create = service.client.completions.create
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        if not streams:
            answer = await create(**settings, max_tokens=new_tokens)
            shown = [{name: getattr(choice.logprobs, name) for name in names} for choice in answer.choices]
            return [choice.text for choice in answer.choices], shown, answer.usage
        texts, shown = ["", ""], [{name: [] for name in names} for _ in prompts]
        options = {"include_usage": True}
        async for chunk in await create(**settings, max_tokens=new_tokens, stream=True, stream_options=options):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                for name in names:
                    shown[choice.index][name] += getattr(choice.logprobs, name)
        return texts, shown, chunk.usage

    texts, shown, usage = talk(served, act, engine)
    for text, one, prompt, own in zip(texts, shown, prompts, ids, strict=True):
        assert text.startswith(prompt) and len(one["tokens"]) == len(own) + new_tokens
        assert one["tokens"][: len(own)] == [served.token_text(token) for token in own]
        assert one["token_logprobs"] == [None, *[-0.5] * (len(own) - 1), *[-0.25] * new_tokens]
        assert one["top_logprobs"][0] is None and all(len(top) == 2 for top in one["top_logprobs"][1:])
        assert one["text_offset"][0] == 0 and one["text_offset"] == sorted(one["text_offset"])
        assert one["text_offset"][len(own) :] == [len(prompt) + place for place in range(new_tokens)]
    assert usage.completion_tokens == 2 * new_tokens


def test_the_token_that_ends_a_scored_text_is_listed(served: ServedModel) -> None:
    """lm-eval leaves out the last token of the list, which it takes for the generated one."""

    async def act(service: Running) -> Any:
        return await service.client.completions.create(
            model="tiny", prompt="some text", max_tokens=1, echo=True, logprobs=1
        )

    engine = FakeEngine(lambda request: [served.eod_id or 0])
    (choice,) = talk(served, act, engine).choices
    assert choice.text == "some text" and choice.finish_reason == "stop"
    assert len(choice.logprobs.tokens) == len(served.tokenizer.encode("some text")) + 1


def test_the_echo_of_tokens_leaves_a_begun_character_to_the_answer(served: ServedModel) -> None:
    ids = served.tokenizer.encode("a🦜b")
    engine = FakeEngine(lambda request: [*ids[3:], served.eod_id or 0])

    async def act(service: Running) -> Any:
        return await service.client.completions.create(model="tiny", prompt=ids[:3], max_tokens=20, echo=True)

    assert len(ids) > 4
    assert talk(served, act, engine).choices[0].text == "a🦜b"


@pytest.mark.parametrize("streams", [False, True])
def test_echo_puts_the_prompt_before_the_answer(served: ServedModel, streams: bool) -> None:
    engine = FakeEngine(saying(served.tokenizer, " and more"))

    async def act(service: Running) -> list[str]:
        settings: dict[str, Any] = {"model": "tiny", "prompt": ["some text", "ş"], "echo": True}
        if not streams:
            answer = await service.client.completions.create(**settings)
            return [choice.text for choice in answer.choices]
        texts = ["", ""]
        async for chunk in await service.client.completions.create(**settings, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
        return texts

    assert talk(served, act, engine) == ["some text and more", "ş and more"]


def test_the_usual_length_is_openais(served: ServedModel) -> None:
    async def act(service: Running) -> Any:
        return await service.client.completions.create(model="tiny", prompt="a")

    assert talk(served, act).usage.completion_tokens == 16
    assert talk(served, act, limits=ServerLimits(new_tokens=5)).usage.completion_tokens == 5


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"prompt": 3}, "'prompt' must be a list"),
        ({"prompt": []}, "'prompt' is an empty list"),
        ({"prompt": [[]]}, "'prompt' must be a text, or a list of token ids"),
        ({"prompt": ["a", 4]}, r"'prompt\[1\]' must be a text, or a list"),
        ({"prompt": [5, 600]}, "'prompt' holds 600, but a token id is from 0 to 599"),
        ({"prompt": ["a"] * 65}, "'prompt' has 65 entries"),
        ({"prompt": [WRONG_TOKEN]}, "token 598, which is wrong here"),
        ({"max_tokens": 0}, "'max_tokens' is 0"),
        ({"max_tokens": POSITIONS}, "The prompt has 1 tokens and 128 were requested"),
        ({"prompt": [1] * POSITIONS}, "The prompt has 128 tokens, but this model has 128 positions"),
        ({"n": 0}, "'n' is 0"),
        ({"logprobs": 21}, "'logprobs' is 21, but must be from 0 to 20"),
        ({"best_of": 2}, "'best_of' is not supported here"),
        ({"suffix": "x"}, "'suffix' is not supported here"),
        ({"stream": "yes"}, "'stream' must be true or false"),
        ({"temperature": "x"}, "temperature"),
        ({"temprature": 1}, "'temprature' is not a field of this request"),
        ({"tools": []}, "'tools' is not a field of this request"),
    ],
)
def test_invalid_fields_give_a_clear_400(served: ServedModel, settings: dict[str, Any], says: str) -> None:
    async def act(service: Running) -> None:
        await service.client.completions.create(**{"model": "tiny", "prompt": "a"}, extra_body=settings)

    with pytest.raises(openai.BadRequestError, match=says) as caught:
        talk(served, act)
    assert caught.value.type == "invalid_request_error"
    if "positions" in caught.value.message:
        assert caught.value.code == "context_length_exceeded"


def test_fields_without_effect_are_accepted(served: ServedModel) -> None:
    harmless = {"best_of": 1, "suffix": None, "stop": None, "logit_bias": None, "echo": False, "store": None}

    async def act(service: Running) -> Any:
        return await service.client.completions.create(model="tiny", prompt="a", extra_body=harmless)

    assert talk(served, act).choices[0].text
