"""The order in which each rank computes, for each schedule that has a name."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.parallel.schedule.actions import Kind, Placement
from megatron.parallel.schedule.simulation import UNIT_COSTS, Computation

_Orders = list[list[Computation]]
_Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_NEVER = np.iinfo(np.int64).max


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


class GreedySchedule:
    """The computations of ranks that compute, whenever they are free, the most urgent of what has arrived.

    That is a backward pass, else a forward pass if its activations still fit, else gradients of weights that were
    put off. All ranks choose at once, so that thousands of computations take no longer than their number asks for.

    Args:
        limits: for each rank, the most chunk activations that it may hold at once.
        splits: whether the gradients of weights are computed apart from those of inputs.

    Attributes:
        end: when the last computation ends.
        peak_alive: for each rank, the most chunk activations that it holds at once.
    """

    def __init__(self, placement: Placement, micro_batches: int, limits: Sequence[int], *, splits: bool) -> None:
        ranks, self._splits = placement.ranks, splits
        self._chunks = np.array([placement.chunks_of(rank) for rank in range(ranks)])  # [ranks, chunks of each]
        places = self._chunks.shape[1]
        self._count, self._micro_batches, self._group = placement.chunks, micro_batches, ranks
        self._is_loop = placement == Placement.loop(ranks, places)
        # A forward pass leaves room for one activation of each of the rank's later chunks.
        self._room = np.array(limits)[:, None] - np.arange(places)[::-1]
        self._next = {kind: np.zeros_like(self._chunks) for kind in (Kind.FORWARD, Kind.BACKWARD)}  # micro-batches
        # When the input of each chunk arrived, and the gradient of its output; the ends of the network wait for none.
        self._input_at = np.full((self._count + 1, micro_batches), _NEVER)
        self._gradient_at = self._input_at.copy()
        self._input_at[0] = self._gradient_at[self._count] = 0
        self._put_off = np.zeros((ranks, places * micro_batches, 2), np.int64)  # chunk and micro-batch
        self._began_off, self._ended_off = np.zeros((2, ranks), np.int64)
        self._alive, self._free_at, self._peak = np.zeros((3, ranks), np.int64)
        self._left = np.full(ranks, places * micro_batches * (3 if splits else 2))
        self._log: list[tuple[Kind, _Integers, _Integers, _Integers]] = []
        time = 0
        while self._left.any():
            self._begin_at(time)
            time += 1
        self.end, self.peak_alive = int(self._free_at.max()), tuple(self._peak.tolist())

    def orders(self) -> _Orders:
        """What each rank computes, in order."""
        kinds = [kind for kind, ranks, *_ in self._log for _ in range(len(ranks))]
        ranks, chunks, batches = (np.concatenate([each[column] for each in self._log]) for column in (1, 2, 3))
        orders: _Orders = [[] for _ in self._left]
        for rank, computation in zip(
            ranks.tolist(), zip(kinds, chunks.tolist(), batches.tolist(), strict=True), strict=True
        ):
            orders[rank].append(computation)
        return orders

    def _begin_at(self, time: int) -> None:
        """Begins what free ranks compute next, on those that have something whose inputs are there."""
        free = np.flatnonzero((self._free_at <= time) & (self._left > 0))
        for kind, urgency in ((Kind.BACKWARD, self._backward_urgency), (Kind.FORWARD, self._forward_urgency)):
            if not len(free):
                return
            keys = urgency(free, time)
            places = keys.argmin(1)
            chosen = keys[np.arange(len(free)), places] < _NEVER
            self._begin(kind, free[chosen], places[chosen], time)
            free = free[~chosen]
        free = free[self._began_off[free] < self._ended_off[free]]
        if len(free):
            chunks, batches = self._put_off[free, self._began_off[free]].T
            self._began_off[free] += 1
            self._alive[free] -= 1
            self._record(Kind.WEIGHT_BACKWARD, free, chunks, batches, time)

    def _begin(self, kind: Kind, ranks: _Integers, places: _Integers, time: int) -> None:
        """Begins a pass of each of these ranks through the chunk at its place."""
        if not len(ranks):
            return
        chunks, batches = self._chunks[ranks, places], self._next[kind][ranks, places]
        self._next[kind][ranks, places] += 1
        if kind is Kind.FORWARD:
            self._alive[ranks] += 1
            self._peak = np.maximum(self._peak, self._alive)
            self._input_at[chunks + 1, batches] = self._record(kind, ranks, chunks, batches, time)
        elif self._splits:
            self._put_off[ranks, self._ended_off[ranks]] = np.stack([chunks, batches], 1)
            self._ended_off[ranks] += 1
            self._gradient_at[chunks, batches] = self._record(Kind.INPUT_BACKWARD, ranks, chunks, batches, time)
        else:
            self._alive[ranks] -= 1
            self._gradient_at[chunks, batches] = self._record(kind, ranks, chunks, batches, time)

    def _record(self, kind: Kind, ranks: _Integers, chunks: _Integers, batches: _Integers, time: int) -> int:
        """Notes what ranks begin; returns when it ends."""
        self._log.append((kind, ranks, chunks, batches))
        self._left[ranks] -= 1
        self._free_at[ranks] = time + int(UNIT_COSTS[kind])
        return time + int(UNIT_COSTS[kind])

    def _backward_urgency(self, free: _Integers, time: int) -> _Integers:
        """Of the next micro-batch of each chunk: the earliest first, and of its chunks the last; else `_NEVER`."""
        chunks, batches = self._chunks[free], self._next[Kind.BACKWARD][free]
        known = np.minimum(batches, self._micro_batches - 1)
        is_there = (self._input_at[chunks + 1, known] <= time) & (self._gradient_at[chunks + 1, known] <= time)
        return np.where(is_there & (batches == known), batches * self._count - chunks, _NEVER)

    def _forward_urgency(self, free: _Integers, time: int) -> _Integers:
        """Of the next micro-batch of each chunk; `_NEVER` where it has not arrived, or there is no room for it.

        In a loop micro-batches pass in groups, as in `fixed_orders`; in a V the chunk nearer to the loss comes first.
        """
        chunks, batches = self._chunks[free], self._next[Kind.FORWARD][free]
        known = np.minimum(batches, self._micro_batches - 1)
        is_there = (self._input_at[chunks, known] <= time) & (self._alive[free, None] < self._room[free])
        places = np.arange(chunks.shape[1])
        order = batches // self._group * chunks.shape[1] + places if self._is_loop else -places
        return np.where(is_there & (batches == known), order, _NEVER)
