"""`/v1/chat/completions` as OpenAI's client sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import openai
import pytest

from tests.trident.serve.fakes import POSITIONS, FakeEngine, Running, running, saying
from trident.serve.requests.served_model import ServedModel

HELLO = [{"role": "user", "content": "Hello"}]


def talk(served: ServedModel, act: Callable[[Running], Awaitable[Any]], engine: FakeEngine | None = None) -> Any:
    """Runs `act` with a service; returns its result."""

    async def whole() -> Any:
        async with running(served, engine) as service:
            return await act(service)

    return asyncio.run(whole())


def test_a_conversation_is_answered(served: ServedModel) -> None:
    engine = FakeEngine(saying(served.tokenizer, "Hi! 👍"))
    messages: list[Any] = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]},
        {"role": "assistant", "content": "Hi", "refusal": None, "tool_calls": None, "annotations": []},
        {"role": "user", "content": "Again"},
    ]

    async def act(service: Running) -> Any:
        return await service.client.chat.completions.create(model="tiny", messages=messages, n=2, seed=4)

    answer = talk(served, act, engine)
    assert [choice.message.content for choice in answer.choices] == ["Hi! 👍"] * 2
    assert {(choice.message.role, choice.finish_reason) for choice in answer.choices} == {("assistant", "stop")}
    assert answer.object == "chat.completion" and answer.id.startswith("chatcmpl-")
    plain = [{"role": role, "content": text} for role, text in (
        ("system", "Be brief."), ("user", "Hello"), ("assistant", "Hi"), ("user", "Again"))]  # fmt: skip
    prompt = tuple(served.template.prompt_ids(plain, served.tokenizer))
    assert [request.prompt for request in engine.requests] == [prompt] * 2
    assert engine.requests[0].max_new_tokens == POSITIONS - len(prompt)  # as many as fit
    assert answer.usage.prompt_tokens == len(prompt)


def test_the_stream_adds_up_to_the_answer_at_once(served: ServedModel) -> None:
    settings: dict[str, Any] = {"model": "tiny", "messages": HELLO, "n": 2, "seed": 1, "max_completion_tokens": 30}
    settings |= {"logprobs": True, "top_logprobs": 3}

    async def act(service: Running) -> tuple[Any, list[Any]]:
        create = service.client.chat.completions.create
        stream = await create(**settings, stream=True, stream_options={"include_usage": True})
        return await create(**settings), [chunk async for chunk in stream]

    whole, chunks = talk(served, act)
    assert chunks[-1].usage == whole.usage and chunks[-1].choices == []
    for choice in whole.choices:
        parts = [part for chunk in chunks for part in chunk.choices if part.index == choice.index]
        assert parts[0].delta.role == "assistant" and parts[0].delta.content == ""
        assert "".join(part.delta.content or "" for part in parts) == choice.message.content
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        shown = [token for part in parts if part.logprobs for token in part.logprobs.content]
        assert shown == choice.logprobs.content and len(shown) == 30
        assert [len(token.top_logprobs) for token in shown] == [3] * 30
        assert all(token.bytes is None or bytes(token.bytes).decode() == token.token for token in shown)


def test_the_stop_texts_of_the_request_and_of_the_template_end_the_answer(served: ServedModel) -> None:
    engine = FakeEngine(saying(served.tokenizer, "one two STOP three"))

    async def act(service: Running) -> Any:
        return await service.client.chat.completions.create(model="tiny", messages=HELLO, stop="STOP")

    assert talk(served, act, engine).choices[0].message.content == "one two "
    assert engine.requests[0].stop_ids == served.chat_stop_ids


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"messages": None}, "'messages' must be a list of at least one message"),
        ({"messages": "hi"}, "'messages' must be a list, not the text 'hi'"),
        ({"messages": []}, "'messages' must be a list of at least one message"),
        ({"messages": ["hi"]}, r"'messages\[0\]' must be an object with role and content"),
        ({"messages": [{"role": "tool", "content": "x"}]}, r"'messages\[0\]\.role' must be system, user or assistant"),
        ({"messages": [{"content": "x"}]}, r"'messages\[0\]\.role' must be .*, not null"),
        ({"messages": [{"role": "user"}]}, r"'messages\[0\]\.content' is missing"),
        ({"messages": [{"role": "user", "content": 3}]}, r"'messages\[0\]\.content' must be a text"),
        ({"messages": [{"role": "user", "content": "x", "name": "y"}]}, r"'messages\[0\]\.name' is not supported"),
        ({"messages": [{"role": "user", "content": "x", "y": 1}]}, r"'messages\[0\]\.y' is not a field"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            r"'messages\[0\]\.content\[0\]\.type' must be text",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, r"'messages\[0\]\.content\[0\]' must be an object"),
        ({"messages": [{"role": "user", "content": "word " * 200}]}, "The prompt has .* but this model has 128"),
        ({"max_tokens": 4, "max_completion_tokens": 5}, "'max_completion_tokens' is 5, but 'max_tokens' is 4"),
        ({"top_logprobs": 3}, "'top_logprobs' is only for requests with logprobs true"),
        ({"tools": [{"type": "function"}]}, "'tools' is not supported here: this server calls no tools"),
        ({"response_format": {"type": "json_object"}}, "'response_format' is not supported here"),
        ({"modalities": ["audio"]}, "'modalities' is not supported here"),
        ({"reasoning_effort": "high"}, "'reasoning_effort' is not supported here"),
        ({"prompt": "x"}, "'prompt' is not a field"),
    ],
)  # fmt: skip
def test_invalid_fields_give_a_clear_400(served: ServedModel, settings: dict[str, Any], says: str) -> None:
    async def act(service: Running) -> None:
        await service.client.chat.completions.create(model="tiny", messages=HELLO, extra_body=settings)

    with pytest.raises(openai.BadRequestError, match=says):
        talk(served, act)


def test_fields_without_effect_are_accepted(served: ServedModel) -> None:
    harmless = {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"]}
    harmless |= {"parallel_tool_calls": True, "service_tier": "auto", "max_tokens": 4, "max_completion_tokens": 4}

    async def act(service: Running) -> Any:
        return await service.client.chat.completions.create(model="tiny", messages=HELLO, extra_body=harmless)

    assert talk(served, act).usage.completion_tokens == 4
