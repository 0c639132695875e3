"""dsGPT2's `/generate`: its JSON, its headers, and what it refuses."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import httpx
import pytest

from megatron.inference.sampling import Sampling
from tests.trident.serve.fakes import FakeEngine, running, saying
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import Refusal
from trident.serve.requests.served_model import ServedModel
from trident.serve.single_turn import SingleTurn, response_of


def get(served: ServedModel, query: str, said: str = "an answer") -> tuple[httpx.Response, FakeEngine]:
    """The response to a query, and the engine behind it."""
    engine = FakeEngine(saying(served.tokenizer, said))

    async def whole() -> httpx.Response:
        async with running(served, engine) as service:
            return await service.http.get(f"/generate?{query}")

    return asyncio.run(whole()), engine


def test_the_answer_has_dsgpt2s_json_and_headers(served: ServedModel) -> None:
    response, engine = get(served, "sentence=%EC%95%88%EB%85%95+%26", " <sys>예</s> <unused12>&<|endoftext|>")
    assert response.json() == {"input": "안녕 &", "response": "예 &"}
    assert response.headers["cache-control"] == "no-cache,no-store,must-revalidate"
    assert response.headers["content-type"] == "application/json; charset=utf-8" and "안녕" in response.text
    assert "access-control-allow-origin" not in response.headers  # only where it was asked for
    assert served.tokenizer.decode(engine.requests[0].prompt) == "안녕 &" and engine.requests[0].max_new_tokens == 60


def test_a_chat_model_answers_a_question(served: ServedModel) -> None:
    chatting = replace(served, is_chat=True)
    _, engine = get(chatting, "sentence=Hello")
    assert engine.requests[0].prompt == served.prompt_of_messages([{"role": "user", "content": "Hello"}])
    assert engine.requests[0].stop_ids == served.chat_stop_ids


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("", "The sentence is missing. Use /generate?sentence=TEXT."),
        ("sentence=", "The sentence is missing"),
        ("sentence=%20", "The sentence is missing"),
        ("sentence=a&top_k=3", "Unknown parameter 'top_k': /generate has only sentence"),
        ("sentence=a&sentence=b", "A parameter of the query is repeated"),
        ("sentence=%ff", "The query is not UTF-8 in percent-encoding"),
        ("sentence=" + "word+" * 200, "The prompt has"),
        ("&".join(f"a{number}=1" for number in range(20)), "The query is not UTF-8"),
    ],
)
def test_a_wrong_query_is_refused(served: ServedModel, query: str, says: str) -> None:
    response, _ = get(served, query)
    assert response.status_code == 400 and says in response.json()["error"]["message"]


def test_draws_are_fresh_unless_a_seed_was_given(served: ServedModel) -> None:
    query: dict[str, Any] = {"sentence": "a"}
    fresh = {SingleTurn(Sampling(seed=1), 5).read(query, served, ServerLimits()).sampling.seed for _ in range(9)}
    fixed = {
        SingleTurn(Sampling(seed=1), 5, has_seed=True).read(query, served, ServerLimits()).sampling.seed
        for _ in range(9)
    }
    assert len(fresh) == 9 and fixed == {1}


def test_the_length_has_the_servers_limit(served: ServedModel) -> None:
    assert SingleTurn(Sampling(), 50).read({"sentence": "a"}, served, ServerLimits(new_tokens=9)).new_tokens == (9,)
    with pytest.raises(Refusal, match="The sentence is missing"):
        SingleTurn(Sampling(), 50).read({}, served, ServerLimits())


def test_special_tokens_are_stripped_and_the_rest_is_not() -> None:
    assert response_of("q", "<s> a <b> <usr></s><pad>c <unused1000> ") == {
        "input": "q",
        "response": "a <b> c <unused1000>",
    }
