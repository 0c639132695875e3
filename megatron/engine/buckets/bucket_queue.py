"""The order in which the gradients of a step are sent, bucket by bucket, while backward passes run."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import nn

Finish = Callable[[], None]

MOST_IN_FLIGHT = 3  # of messages with separate memory


class Buckets(NamedTuple):
    """Settings of the buckets in which data-parallel ranks exchange gradients and weights.

    Attributes:
        elements: the size at which a bucket is complete.
        overlap: messages run under computation.
        exchanged_dtype: see `Averaging`.
    """

    elements: int
    overlap: bool = True
    exchanged_dtype: torch.dtype | None = None


class BucketQueue:
    """Starts the message of each bucket as soon as its gradients and those of all earlier buckets are complete.

    Collectives must start in the same order on all ranks, which may lack different gradients. Therefore the order is
    fixed. Backward passes complete the last layers first, so it begins with the bucket whose first parameter is last.

    Args:
        buckets: the parameters of each bucket.
        order: the index of every parameter in the network, by its id.
        start: starts the message of a bucket, given its index; returns the work to be done once it is awaited.
        in_flight: the most messages in transit; the oldest is awaited before another one starts. None for no limit.
        overlaps: False awaits each message at once.
    """

    def __init__(
        self,
        buckets: Sequence[Sequence[nn.Parameter]],
        order: Mapping[int, int],
        start: Callable[[int], Finish],
        in_flight: int | None = None,
        *,
        overlaps: bool = True,
    ) -> None:
        self._start_message, self._in_flight = start, in_flight if overlaps else 0
        self._sizes = [len(members) for members in buckets]
        self.bucket_of = {id(each): number for number, members in enumerate(buckets) for each in members}
        self._order = forward_order(buckets, order)[::-1]
        self._held: list[int] = []
        self._running: deque[tuple[int, Finish]] = deque()
        self.reset()

    def hold(self, parameters: Iterable[nn.Parameter]) -> None:
        """Starts the buckets of these parameters only in `finish`, last."""
        held = {self.bucket_of[id(parameter)] for parameter in parameters}
        self._held += [number for number in self._order if number in held]
        self._order = [number for number in self._order if number not in held]

    def reset(self) -> None:
        """Begins the next round: no gradient is complete, and no bucket has started."""
        self._missing = list(self._sizes)
        self._complete: set[int] = set()
        self._started: set[int] = set()
        self._next = 0

    def has_started(self, bucket: int) -> bool:
        return bucket in self._started

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Announces complete gradients, and starts the messages that can start; repeated parameters are ignored."""
        for parameter in parameters:
            if id(parameter) not in self._complete:
                self._complete.add(id(parameter))
                self._missing[self.bucket_of[id(parameter)]] -= 1
        while self._next < len(self._order) and not self._missing[self._order[self._next]]:
            self.start(self._order[self._next])

    def start(self, bucket: int) -> None:
        """Starts the message of a bucket, unless it has started in this round."""
        if bucket not in self._started:
            while self._is_full or any(running == bucket for running, _ in self._running):
                self._running.popleft()[1]()
            self._running.append((bucket, self._start_message(bucket)))
            self._started.add(bucket)
            if self._in_flight == 0:
                self.wait()
        while self._next < len(self._order) and self._order[self._next] in self._started:
            self._next += 1

    def start_all(self, buckets: Collection[int]) -> None:
        """Starts the messages of these buckets, in order."""
        for bucket in self._order:
            if bucket in buckets:
                self.start(bucket)

    def finish(self) -> None:
        """Starts the remaining messages, and waits for all."""
        for bucket in (*self._order[self._next :], *self._held):
            self.start(bucket)
        self.wait()

    def wait(self) -> None:
        """Waits for the messages in transit."""
        while self._running:
            self._running.popleft()[1]()

    @property
    def _is_full(self) -> bool:
        return self._in_flight is not None and len(self._running) >= max(1, self._in_flight)


def forward_order(buckets: Sequence[Sequence[nn.Parameter]], order: Mapping[int, int]) -> list[int]:
    """The indices of buckets, sorted by their first parameter in the network; see `BucketQueue` for `order`."""
    first = [min(order[id(each)] for each in members) for members in buckets]
    return sorted(range(len(buckets)), key=first.__getitem__)


def in_buckets(parameters: Sequence[nn.Parameter], elements: int) -> Iterator[list[nn.Parameter]]:
    """Divides parameters into buckets, from the last to the first.

    A bucket is complete once it has this many elements; within a bucket, parameters keep their order.
    """
    members: list[nn.Parameter] = []
    size = 0
    for parameter in reversed(parameters):
        members.append(parameter)
        size += parameter.numel()
        if size >= elements:
            yield members[::-1]
            members, size = [], 0
    if members:
        yield members[::-1]
