"""Requests take turns, whatever their size."""

from __future__ import annotations

from megatron.inference.serve.running.fair_queue import FairQueue


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
