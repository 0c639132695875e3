"""Requests on the event loop: their tokens, their limits and their end."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Awaitable, Callable

import pytest

from megatron.inference.generation import GeneratedToken, Request
from megatron.inference.sampling import Sampling
from trident.serve.execution.engine_loop import Add, Cancel, Command, RejectedSequence
from trident.serve.execution.jobs import GenerationJob, Jobs
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import Refusal, stopping


def requests(count: int) -> list[Request]:
    """Sequences of a request that is called x."""
    return [Request(f"x/{place}", (1,), 5, Sampling()) for place in range(count)]


def token(place: int, value: int, finish: str | None = None) -> GeneratedToken:
    """A token of such a sequence."""
    return GeneratedToken(f"x/{place}", value, -1.0, (), finish)  # type: ignore[arg-type]


def with_jobs(
    act: Callable[[Jobs, GenerationJob], Awaitable[None]], count: int = 2, limits: ServerLimits | None = None
) -> list[Command]:
    """The commands that reached the engine's loop while `act` had a request open."""
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    jobs = Jobs(commands, limits or ServerLimits())

    async def whole() -> None:
        with jobs.open("x", requests(count)) as job:
            await act(jobs, job)

    try:
        asyncio.run(whole())
    finally:
        assert len(jobs) == 0 and jobs.sequences == 0
    found = []
    while not commands.empty():
        found.append(commands.get())
    assert found[0] == Add("x", tuple(requests(count)))
    return found[1:]


def test_tokens_arrive_with_the_place_of_their_sequence() -> None:
    async def act(jobs: Jobs, job: GenerationJob) -> None:
        jobs.arrive([token(0, 7), token(1, 8), GeneratedToken("other/0", 9)])
        jobs.arrive([token(1, 9, "stop"), token(0, 6, "length")])
        assert [(place, one.token) async for place, one in job.tokens()] == [(0, 7), (1, 8), (1, 9), (0, 6)]

    assert with_jobs(act) == []


def test_a_sequence_that_is_ended_early_is_cancelled_and_its_later_tokens_are_dropped() -> None:
    async def act(jobs: Jobs, job: GenerationJob) -> None:
        jobs.arrive([token(0, 7)])
        tokens = job.tokens()
        assert (await anext(tokens))[1].token == 7
        job.end(0)
        job.end(0)
        jobs.arrive([token(0, 8), token(1, 9, "stop")])
        assert [one.token async for _, one in tokens] == [9]

    assert with_jobs(act) == [Cancel("x", frozenset(["x/0"]))]


def test_a_sequence_that_failed_fails_the_request() -> None:
    async def act(jobs: Jobs, job: GenerationJob) -> None:
        jobs.arrive([token(0, 7), GeneratedToken("x/1", None, finish="failed", failure="why")])
        tokens = job.tokens()
        assert (await anext(tokens))[1].token == 7
        with pytest.raises(Refusal, match="failed to carry out") as caught:
            await anext(tokens)
        assert caught.value.status == 500

    assert with_jobs(act) == [Cancel("x", frozenset(["x/0", "x/1"]))]


def test_unfinished_sequences_are_cancelled_when_the_request_is_closed() -> None:
    async def act(jobs: Jobs, job: GenerationJob) -> None:
        jobs.arrive([token(0, 7, "stop")])
        assert (await anext(job.tokens()))[0] == 0

    assert with_jobs(act) == [Cancel("x", frozenset(["x/1"]))]


def test_a_sequence_that_the_engine_refuses_refuses_the_request() -> None:
    async def act(jobs: Jobs, job: GenerationJob) -> None:
        jobs.arrive([RejectedSequence("x/0", "too long for the caches")])
        await anext(job.tokens())

    with pytest.raises(Refusal, match="too long for the caches") as caught:
        with_jobs(act)
    assert caught.value.status == 400


def test_a_request_has_its_time() -> None:
    async def act(jobs: Jobs, job: GenerationJob) -> None:
        await anext(job.tokens())

    with pytest.raises(Refusal, match=r"not complete within 0\.01 s") as caught:
        with_jobs(act, limits=ServerLimits(request_seconds=0.01))
    assert (caught.value.status, caught.value.code) == (504, "timeout")


def test_too_many_sequences_are_refused() -> None:
    async def act(jobs: Jobs, job: GenerationJob) -> None:
        with jobs.open("y", requests(1)):
            pass

    with pytest.raises(Refusal, match="2 answers are running or waiting, and the server takes at most 2") as caught:
        with_jobs(act, limits=ServerLimits(queued_sequences=2))
    assert caught.value.status == 503


@pytest.mark.parametrize("ends_all", [False, True])
def test_a_stopping_server_takes_nothing_new_and_may_end_what_runs(ends_all: bool) -> None:
    async def act(jobs: Jobs, job: GenerationJob) -> None:
        (jobs.end_all if ends_all else jobs.refuse_new)(stopping())
        with pytest.raises(Refusal, match="The server is stopping"), jobs.open("y", requests(1)):
            pass
        if ends_all:
            with pytest.raises(Refusal, match="The server is stopping"):
                await anext(job.tokens())
        else:
            jobs.arrive([token(0, 1, "stop"), token(1, 1, "stop")])
            assert len([one async for one in job.tokens()]) == 2

    with_jobs(act)
