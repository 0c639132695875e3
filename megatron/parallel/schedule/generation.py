"""The order in which each rank computes, for each schedule that has a name."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from megatron.parallel.schedule.actions import Kind, Placement
from megatron.parallel.schedule.simulation import UNIT_COSTS, Computation, Result, needs_of, result_of

_Orders = list[list[Computation]]


def fixed_orders(ranks: int, chunks_per_rank: int, micro_batches: int) -> _Orders:
    """Warm-up forward passes, then one forward and one backward pass in turn, then the remaining backward passes.

    Micro-batches pass in groups of as many as there are ranks: all of a group through a rank's first chunk, then all
    through its second. Micro-batches that fill up the last group are left out in the end, which delays nothing.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 2.2; the length of the warm-up is that of Megatron-LM, megatron/core/pipeline_parallel/schedules.py.
    """
    group_size = 1 if chunks_per_rank == 1 else ranks
    passes = [
        (step * ranks, group + place)
        for group in range(0, micro_batches, group_size)
        for step in range(chunks_per_rank)
        for place in range(group_size)
    ]
    last = (chunks_per_rank - 1) * ranks
    orders = []
    for rank in range(ranks):
        after = ranks - 1 - rank
        warm_up = after if chunks_per_rank == 1 else 2 * after + last
        forward = [(Kind.FORWARD, rank + offset, batch) for offset, batch in passes]
        backward = [(Kind.BACKWARD, rank + last - offset, batch) for offset, batch in passes]
        order = forward[:warm_up]
        for index, computation in enumerate(backward):
            order += [*forward[warm_up + index : warm_up + index + 1], computation]
        orders.append([computation for computation in order if computation[2] < micro_batches])
    return orders


def greedy_orders(placement: Placement, micro_batches: int, limits: Sequence[int], *, splits: bool) -> _Orders:
    """The orders of ranks that compute, whenever they are free, the most urgent of what has arrived.

    That is a backward pass, else a forward pass if its activations still fit, else gradients of weights that were
    put off.

    Args:
        limits: for each rank, the most chunk activations that it may hold at once.
        splits: whether the gradients of weights are computed apart from those of inputs.
    """
    ranks = [_GreedyRank(placement, rank, micro_batches, limit, splits) for rank, limit in enumerate(limits)]
    ended: dict[Result, float] = {}
    time = 0
    while any(rank.remaining for rank in ranks):
        for rank in ranks:
            if rank.free_at <= time:
                rank.start_next(time, ended)
        time += 1
    return [rank.order for rank in ranks]


class _GreedyRank:
    """A rank that chooses what it computes next."""

    def __init__(self, placement: Placement, rank: int, micro_batches: int, limit: int, splits: bool) -> None:
        self.order: list[Computation] = []
        self.free_at = 0.0
        self.remaining = len(placement.chunks_of(rank)) * micro_batches * (3 if splits else 2)
        self._chunks, self._chunk_count = placement.chunks_of(rank), placement.chunks
        self._is_loop = placement == Placement.loop(placement.ranks, len(self._chunks))
        self._group = placement.ranks
        self._micro_batches, self._limit, self._splits = micro_batches, limit, splits
        self._forward = dict.fromkeys(self._chunks, 0)  # the next micro-batch of each chunk
        self._backward = dict.fromkeys(self._chunks, 0)
        self._put_off: deque[Computation] = deque()
        self._alive = 0

    def start_next(self, time: float, ended: dict[Result, float]) -> None:
        """Starts a computation, if there is one whose inputs are there at this time."""
        candidates = [*self._backward_passes(), *self._forward_passes()]
        for computation in (*candidates, *list(self._put_off)[:1]):
            needs = needs_of(computation, self._chunk_count)
            if all(ended.get(need, time + 1) <= time for need in needs):
                break
        else:
            return
        kind, chunk, micro_batch = computation
        self.order.append(computation)
        self.remaining -= 1
        self.free_at = time + UNIT_COSTS[kind]
        if kind is Kind.FORWARD:
            self._forward[chunk] += 1
            self._alive += 1
        elif kind is Kind.WEIGHT_BACKWARD:
            self._put_off.popleft()
            self._alive -= 1
        else:
            self._backward[chunk] += 1
            if self._splits:
                self._put_off.append((Kind.WEIGHT_BACKWARD, chunk, micro_batch))
            else:
                self._alive -= 1
        if (result := result_of(computation)) is not None:
            ended[result] = self.free_at

    def _backward_passes(self) -> list[Computation]:
        """The next of each chunk; the earliest micro-batch first, and of its chunks the last."""
        kind = Kind.INPUT_BACKWARD if self._splits else Kind.BACKWARD
        upcoming = [(batch, -chunk) for chunk, batch in self._backward.items() if batch < self._micro_batches]
        return [(kind, -chunk, batch) for batch, chunk in sorted(upcoming)]

    def _forward_passes(self) -> list[Computation]:
        """The next of each chunk for which there is room beside one activation for each of the rank's later chunks.

        In a loop micro-batches pass in groups, as in `fixed_orders`; in a V the chunk nearer to the loss comes first.
        """
        later = len(self._chunks) - 1
        upcoming = [
            (place, chunk, batch)
            for place, (chunk, batch) in enumerate(self._forward.items())
            if batch < self._micro_batches and self._alive < self._limit - (later - place)
        ]
        if self._is_loop:
            upcoming.sort(key=lambda item: (item[2] // self._group, item[0], item[2]))
        else:
            upcoming.reverse()
        return [(Kind.FORWARD, chunk, batch) for _, chunk, batch in upcoming]
