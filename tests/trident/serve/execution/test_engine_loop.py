"""The loop admits what fits, steps, delivers, drops what is cancelled, and ends when told."""

from __future__ import annotations

import queue
import threading
from collections.abc import Sequence

import pytest

from megatron.inference.generation import GeneratedToken, Request
from megatron.inference.sampling import Sampling
from tests.trident.serve.fakes import WRONG_TOKEN, FakeEngine
from trident.serve.execution import engine_loop
from trident.serve.execution.engine_loop import (
    Add,
    Arrival,
    Cancel,
    Command,
    EngineLoop,
    FairQueue,
    RejectedSequence,
    Stop,
)


@pytest.fixture(autouse=True)
def looks_often(monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle loop looks at its engine at once, which is how these tests end it."""
    monkeypatch.setattr(engine_loop, "_IDLE_CHECK_SECONDS", 0.001)


def requests(job: str, count: int, tokens: int = 3, prompt: tuple[int, ...] = (5,)) -> tuple[Request, ...]:
    """Sequences of one request."""
    return tuple(Request(f"{job}/{place}", prompt, tokens, Sampling(), place) for place in range(count))


def run(engine: FakeEngine, *commands: Command, max_running: int = 2) -> list[Arrival]:
    """Runs the loop on commands and stops it once everything has ended; returns the deliveries."""
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    for command in commands:
        inbox.put(command)
    found: list[Arrival] = []

    def deliver(arrivals: Sequence[Arrival]) -> None:
        found.extend(arrivals)

    loop = EngineLoop(inbox, deliver, max_running, check_idle=lambda: inbox.put(Stop()))
    loop.run(engine)
    assert (loop.load.running, loop.load.waiting) == (0, 0) and loop.load.steps == engine.steps
    return found


def test_sequences_of_different_requests_take_turns() -> None:
    engine = FakeEngine()
    found = run(engine, Add("a", requests("a", 3)), Add("b", requests("b", 1)))
    assert [request.id for request in engine.requests] == ["a/0", "b/0", "a/1", "a/2"]
    tokens: dict[str, list[int]] = {}
    for arrival in found:
        assert isinstance(arrival, GeneratedToken) and arrival.token is not None
        tokens.setdefault(arrival.request_id, []).append(arrival.token)
    assert {name: len(ids) for name, ids in tokens.items()} == {"a/0": 3, "b/0": 3, "a/1": 3, "a/2": 3}
    assert tokens == {request.id: list(engine.answer(request)) for request in engine.requests}


def test_a_cancelled_sequence_is_dropped_wherever_it_is() -> None:
    engine = FakeEngine()
    cancelled = Cancel("a", frozenset(["a/0", "a/2", "a/9"]))

    def answer(request: Request) -> list[int]:
        if request.id == "a/0":
            commands.put(cancelled)
        return [1] * request.max_new_tokens

    engine.answer = answer
    commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
    commands.put(Add("a", requests("a", 3, tokens=50)))
    found: list[Arrival] = []
    loop = EngineLoop(commands, found.extend, 1, check_idle=lambda: commands.put(Stop()))
    loop.run(engine)
    assert engine.cancelled == ["a/0"] and [request.id for request in engine.requests] == ["a/0", "a/1"]
    assert sum(arrival.request_id == "a/0" for arrival in found) == 1  # of the step before the command was seen
    assert sum(arrival.request_id == "a/1" for arrival in found) == 50


def test_a_refusal_of_the_engine_is_delivered() -> None:
    found = run(FakeEngine(), Add("a", requests("a", 1, prompt=(WRONG_TOKEN,))), Add("b", requests("b", 1)))
    assert isinstance(found[0], RejectedSequence) and found[0].request_id == "a/0" and "token 598" in found[0].reason
    assert [arrival.request_id for arrival in found[1:]] == ["b/0"] * 3


def test_stop_drops_what_is_left() -> None:
    engine = FakeEngine(step_seconds=0.001)
    inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
    loop = EngineLoop(inbox, lambda arrivals: None, 1)
    thread = threading.Thread(target=loop.run, args=(engine,))
    thread.start()
    inbox.put(Add("a", requests("a", 2, tokens=10_000)))
    while engine.steps < 3:
        pass
    inbox.put(Stop())
    thread.join(120)
    assert not thread.is_alive() and engine.cancelled == ["a/0"]


def test_the_idle_engine_is_looked_at() -> None:
    looks = 0

    def look() -> None:
        nonlocal looks
        looks += 1
        if looks == 3:
            raise RuntimeError("rank 1 ended")

    with pytest.raises(RuntimeError, match="rank 1 ended"):
        EngineLoop(queue.SimpleQueue(), lambda arrivals: None, 1, check_idle=look).run(FakeEngine())


def test_a_failure_of_the_engine_leaves_the_loop() -> None:
    engine = FakeEngine(fails=ValueError("NaN"))
    with pytest.raises(ValueError, match="NaN"):
        run(engine, Add("a", requests("a", 1)))


def test_a_large_request_does_not_hold_up_a_small_one() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.add("large", range(4))
    queue.add("small", [10])
    queue.add("middle", [20, 21])
    order = [queue.take() for _ in range(len(queue))]
    assert [item for _, item in order] == [0, 10, 20, 1, 21, 2, 3]
    assert [name for name, _ in order[:3]] == ["large", "small", "middle"] and len(queue) == 0


def test_sequences_are_removed_while_they_wait() -> None:
    queue: FairQueue[int] = FairQueue()
    queue.add("a", range(3))
    queue.add("b", [7])
    queue.remove("a", lambda item: item != 1)
    queue.remove("b", lambda item: True)
    queue.remove("gone", lambda item: True)
    assert len(queue) == 1 and queue.take() == ("a", 1)
    queue.add("none", [])
    assert len(queue) == 0
