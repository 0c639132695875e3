"""The states of a service, apart from HTTP."""

from __future__ import annotations

import asyncio
import queue

import pytest

from megatron.inference.sampling import Sampling
from megatron.inference.serve.metrics import Metrics
from megatron.inference.serve.requests.limits import Limits
from megatron.inference.serve.requests.refusals import Refusal, broken
from megatron.inference.serve.requests.served import Served
from megatron.inference.serve.running.engine_loop import Load
from megatron.inference.serve.running.jobs import Jobs
from megatron.inference.serve.service import READY, STARTING, STOPPING, Service
from megatron.inference.serve.single_turn import SingleTurn


@pytest.fixture
def service() -> Service:
    """A service without an engine."""
    jobs = Jobs(queue.SimpleQueue(), Limits())
    return Service(Limits(), jobs, Metrics(Load(), lambda: 0), SingleTurn(Sampling(), 5))


def test_a_service_starts_is_ready_and_stops(service: Service, served: Served) -> None:
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


def test_a_service_that_ended_says_why(service: Service, served: Served) -> None:
    service.open(served)
    service.end(broken())
    with pytest.raises(Refusal, match="The server is stopping"):
        asyncio.run(service.completions(b'{"prompt": "a"}'))
    with pytest.raises(Refusal, match="'x' is not served here"):
        Service(Limits(), service.jobs, service.metrics, service.single_turn, served, READY).one_model("x")
