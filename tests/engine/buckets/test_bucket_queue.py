"""The order in which buckets are sent, and how many at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from megatron.engine.buckets.bucket_queue import BucketQueue, in_buckets

PARAMETERS = [nn.Parameter(torch.zeros(size)) for size in (4, 3, 2, 2, 1)]
ORDER = {id(parameter): index for index, parameter in enumerate(PARAMETERS)}
BUCKETS = [[PARAMETERS[0], PARAMETERS[2]], [PARAMETERS[1]], [PARAMETERS[3], PARAMETERS[4]]]


class Recorded:
    """A queue, and the messages that it starts and awaits."""

    def __init__(self, in_flight: int | None = None, *, overlaps: bool = True) -> None:
        self.events: list[str] = []
        self.queue = BucketQueue(BUCKETS, ORDER, self._start, in_flight, overlaps=overlaps)

    def _start(self, bucket: int) -> Callable[[], None]:
        self.events.append(f"start {bucket}")
        return lambda: self.events.append(f"end {bucket}")


def test_parameters_are_divided_from_the_last_to_the_first() -> None:
    numbers = [[ORDER[id(each)] for each in bucket] for bucket in in_buckets(PARAMETERS, 4)]
    assert numbers == [[2, 3, 4], [0, 1]]
    assert [len(bucket) for bucket in in_buckets(PARAMETERS, 1)] == [1] * 5
    assert [len(bucket) for bucket in in_buckets(PARAMETERS, 1000)] == [5]


def test_buckets_start_in_one_order_however_gradients_are_completed() -> None:
    recorded = Recorded()
    for index in (1, 0, 2):  # two buckets are complete, but the first to be sent is not
        recorded.queue.complete([PARAMETERS[index]])
    assert recorded.events == []
    recorded.queue.complete([PARAMETERS[4], PARAMETERS[4], PARAMETERS[3]])
    assert recorded.events == ["start 2", "start 1", "start 0"]
    recorded.queue.finish()
    assert recorded.events[3:] == ["end 2", "end 1", "end 0"]


def test_incomplete_buckets_are_sent_at_the_end_and_held_ones_last() -> None:
    recorded = Recorded()
    recorded.queue.hold([PARAMETERS[3]])
    recorded.queue.complete(PARAMETERS[1:])
    assert recorded.events == ["start 1"] and recorded.queue.has_started(1) and not recorded.queue.has_started(2)
    recorded.queue.finish()
    assert recorded.events == ["start 1", "start 0", "start 2", "end 1", "end 0", "end 2"]
    recorded.queue.reset()
    recorded.queue.complete([PARAMETERS[1]])
    assert recorded.events[6:] == ["start 1"]


def test_the_oldest_message_makes_room_and_a_bucket_is_never_in_transit_twice() -> None:
    recorded = Recorded(in_flight=2)
    recorded.queue.complete(PARAMETERS)
    assert recorded.events == ["start 2", "start 1", "end 2", "start 0"]
    recorded.queue.reset()
    recorded.queue.start_all({0})
    assert recorded.events[4:] == ["end 1", "end 0", "start 0"]


def test_without_overlap_each_message_is_awaited_at_once() -> None:
    recorded = Recorded(overlaps=False)
    recorded.queue.complete(PARAMETERS)
    assert recorded.events == ["start 2", "end 2", "start 1", "end 1", "start 0", "end 0"]
