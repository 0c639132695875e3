"""The states of a service, apart from HTTP."""

from __future__ import annotations

import asyncio
import json
import queue
from typing import Any

import pytest

from megatron.inference.generation import GeneratedToken
from megatron.inference.sampling import Sampling
from trident.serve.answers import END_OF_EVENTS, Answer, event
from trident.serve.completions import CompletionForm
from trident.serve.execution.engine_loop import Load
from trident.serve.execution.jobs import Jobs
from trident.serve.metrics import ServerMetrics
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.parsing import GenerationRequest
from trident.serve.requests.refusals import Refusal, broken
from trident.serve.requests.served_model import ServedModel
from trident.serve.service import READY, STARTING, STOPPING, Service
from trident.serve.single_turn import SingleTurn


@pytest.fixture
def service() -> Service:
    """A service without an engine."""
    jobs = Jobs(queue.SimpleQueue(), ServerLimits())
    return Service(ServerLimits(), jobs, ServerMetrics(Load(), lambda: 0), SingleTurn(Sampling(), 5))


def test_a_service_starts_is_ready_and_stops(service: Service, served: ServedModel) -> None:
    assert (service.state, service.health().status) == (STARTING, 503)
    with pytest.raises(Refusal, match="The checkpoint is being loaded"):
        service.models()
    service.open(served)
    assert (service.state, service.health().status) == (READY, 200)
    assert service.models().content["data"] == [service.one_model("tiny").content]
    service.drain()
    assert (service.state, service.health().status) == (STOPPING, 503)
    with pytest.raises(Refusal, match="The server is stopping"):
        asyncio.run(service.generate({"sentence": "a"}))
    service.open(served)
    assert service.state == STOPPING


def test_an_ended_service_refuses_requests(service: Service, served: ServedModel) -> None:
    service.open(served)
    service.end(broken())
    with pytest.raises(Refusal, match="The server is stopping"):
        asyncio.run(service.completions(b'{"prompt": "a"}'))
    with pytest.raises(Refusal, match="'x' is not served here"):
        Service(ServerLimits(), service.jobs, service.metrics, service.single_turn, served, READY).one_model("x")


def events_of(served: ServedModel, *arrivals: Any, **changes: Any) -> list[Any]:
    """The events of an answer for which these tokens, or a refusal, arrive."""
    jobs = Jobs(queue.SimpleQueue(), ServerLimits())
    settings = {"streams": True, **changes}
    request = GenerationRequest(((5,),), ("",), 1, (9,), Sampling(), (), served.stop_ids, **settings)
    answer = Answer(request, served, jobs, ServerMetrics(Load(), lambda: 0), "x")

    async def whole() -> list[bytes]:
        found = []
        events = answer.events(CompletionForm(request, served, "x", 0))
        waiting = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        for arrival in arrivals:
            jobs.end_all(arrival) if isinstance(arrival, Refusal) else jobs.arrive([arrival])
        found.append(await waiting)
        return found + [one async for one in events]

    return [one if one == END_OF_EVENTS else json.loads(one.removeprefix(b"data: ")) for one in asyncio.run(whole())]


def test_a_stream_ends_with_its_usage_if_requested(served: ServedModel) -> None:
    tokens = [GeneratedToken("x/0", 40, -1.0), GeneratedToken("x/0", 41, -1.0, finish="length")]
    plain = events_of(served, *tokens)
    assert [one["choices"][0]["finish_reason"] for one in plain[:-1]] == [None, "length"] and plain[-1] == END_OF_EVENTS
    *_, usage, end = events_of(served, *tokens, with_usage=True)
    assert usage["usage"] == {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3} and end == END_OF_EVENTS


def test_a_refusal_before_the_first_event_is_no_event(served: ServedModel) -> None:
    with pytest.raises(Refusal, match="The server failed to carry out the request"):
        events_of(served, broken())


def test_a_refusal_in_the_middle_is_the_last_event(served: ServedModel) -> None:
    first, last = events_of(served, GeneratedToken("x/0", 40, -1.0), broken())
    assert first["choices"][0]["text"] and last == broken().to_json()


def test_an_event_is_one_line_whatever_is_in_it() -> None:
    assert event({"a": "ş\n\r\u2028"}) == 'data: {"a":"ş\\n\\r\u2028"}\n\n'.encode()
