"""The order of computations on each rank, for named schedules."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.parallel.schedule.actions import Kind, Placement
from megatron.parallel.schedule.simulation import UNIT_COSTS, Computation

_Orders = list[list[Computation]]
_Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]
_NEVER = np.iinfo(np.int64).max


def fixed_orders(ranks: int, chunks_per_rank: int, micro_batches: int) -> _Orders:
    """1F1B and interleaved: warm-up forward passes, forward and backward passes in turn, remaining backward passes.

    With several chunks, micro-batches pass in groups of the number of ranks: a whole group through a rank's first
    chunk, then through its second. The last group is filled up with micro-batches that are removed at the end.

    Source: Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021),
    section 2.2; the length of the warm-up as in Megatron-LM, megatron/core/pipeline_parallel/schedules.py.
    """
    group_size = 1 if chunks_per_rank == 1 else ranks
    passes = [
        (step * ranks, group + offset)
        for group in range(0, micro_batches, group_size)
        for step in range(chunks_per_rank)
        for offset in range(group_size)
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
    """A list schedule: each free rank runs its most urgent ready computation.

    That is a backward pass, else a forward pass if its activations fit, else deferred weight gradients. Vectorized over
    ranks, so that time is linear in the number of computations.

    Args:
        limits: for each rank, the maximum number of chunk activations.
        splits: weight gradients are computed separately from input gradients.

    Attributes:
        end: when the last computation ends.
        peak_alive: for each rank, the peak number of chunk activations.
    """

    def __init__(self, placement: Placement, micro_batches: int, limits: Sequence[int], *, splits: bool) -> None:
        ranks, self._splits = placement.ranks, splits
        self._chunks = np.array([placement.chunks_of(rank) for rank in range(ranks)])  # [ranks, chunks of each]
        slots = self._chunks.shape[1]
        self._count, self._micro_batches, self._group = placement.chunks, micro_batches, ranks
        self._is_loop = placement == Placement.loop(ranks, slots)
        # A forward pass leaves room for one activation of each of the rank's later chunks.
        self._room = np.array(limits)[:, None] - np.arange(slots)[::-1]
        self._next = {kind: np.zeros_like(self._chunks) for kind in (Kind.FORWARD, Kind.BACKWARD)}  # micro-batches
        # Arrival times of each chunk's input and of its output's gradient; 0 at the ends of the network.
        self._input_at = np.full((self._count + 1, micro_batches), _NEVER)
        self._gradient_at = self._input_at.copy()
        self._input_at[0] = self._gradient_at[self._count] = 0
        # Queues of deferred weight gradients (chunk and micro-batch), with their heads and tails.
        self._deferred = np.zeros((ranks, slots * micro_batches, 2), np.int64)
        self._heads, self._tails = np.zeros((2, ranks), np.int64)
        self._alive, self._free_at, self._peak = np.zeros((3, ranks), np.int64)
        self._left = np.full(ranks, slots * micro_batches * (3 if splits else 2))
        self._log: list[tuple[Kind, _Integers, _Integers, _Integers]] = []
        time = 0
        while self._left.any():
            self._begin_at(time)
            time += 1
        self.end, self.peak_alive = int(self._free_at.max()), tuple(self._peak.tolist())

    def orders(self) -> _Orders:
        """The computations of each rank, in order."""
        kinds = [kind for kind, ranks, *_ in self._log for _ in range(len(ranks))]
        ranks, chunks, batches = (np.concatenate([each[column] for each in self._log]) for column in (1, 2, 3))
        orders: _Orders = [[] for _ in self._left]
        for rank, computation in zip(
            ranks.tolist(), zip(kinds, chunks.tolist(), batches.tolist(), strict=True), strict=True
        ):
            orders[rank].append(computation)
        return orders

    def _begin_at(self, time: int) -> None:
        """Starts the next computation on each free rank that has one with available inputs."""
        free = np.flatnonzero((self._free_at <= time) & (self._left > 0))
        for kind, urgency in ((Kind.BACKWARD, self._backward_urgency), (Kind.FORWARD, self._forward_urgency)):
            if not len(free):
                return
            keys = urgency(free, time)
            slots = keys.argmin(1)
            chosen = keys[np.arange(len(free)), slots] < _NEVER
            self._begin(kind, free[chosen], slots[chosen], time)
            free = free[~chosen]
        free = free[self._heads[free] < self._tails[free]]
        if len(free):
            chunks, batches = self._deferred[free, self._heads[free]].T
            self._heads[free] += 1
            self._alive[free] -= 1
            self._record(Kind.WEIGHT_BACKWARD, free, chunks, batches, time)

    def _begin(self, kind: Kind, ranks: _Integers, slots: _Integers, time: int) -> None:
        """Starts a pass through one chunk on each of these ranks, the slot-th chunk of the rank."""
        if not len(ranks):
            return
        chunks, batches = self._chunks[ranks, slots], self._next[kind][ranks, slots]
        self._next[kind][ranks, slots] += 1
        if kind is Kind.FORWARD:
            self._alive[ranks] += 1
            self._peak = np.maximum(self._peak, self._alive)
            self._input_at[chunks + 1, batches] = self._record(kind, ranks, chunks, batches, time)
        elif self._splits:
            self._deferred[ranks, self._tails[ranks]] = np.stack([chunks, batches], 1)
            self._tails[ranks] += 1
            self._gradient_at[chunks, batches] = self._record(Kind.INPUT_BACKWARD, ranks, chunks, batches, time)
        else:
            self._alive[ranks] -= 1
            self._gradient_at[chunks, batches] = self._record(kind, ranks, chunks, batches, time)

    def _record(self, kind: Kind, ranks: _Integers, chunks: _Integers, batches: _Integers, time: int) -> int:
        """Records the computations that ranks start; returns when these end."""
        self._log.append((kind, ranks, chunks, batches))
        self._left[ranks] -= 1
        self._free_at[ranks] = time + int(UNIT_COSTS[kind])
        return time + int(UNIT_COSTS[kind])

    def _backward_urgency(self, free: _Integers, time: int) -> _Integers:
        """Sort keys of the next micro-batch of each chunk: the earliest first, then the last chunk; else `_NEVER`."""
        chunks, batches = self._chunks[free], self._next[Kind.BACKWARD][free]
        known = np.minimum(batches, self._micro_batches - 1)
        is_ready = (self._input_at[chunks + 1, known] <= time) & (self._gradient_at[chunks + 1, known] <= time)
        return np.where(is_ready & (batches == known), batches * self._count - chunks, _NEVER)

    def _forward_urgency(self, free: _Integers, time: int) -> _Integers:
        """Sort keys of the next micro-batch of each chunk; `_NEVER` if it has not arrived, or does not fit.

        In a loop, micro-batches pass in groups, as in `fixed_orders`; in a V, the chunk nearer to the loss comes first.
        """
        chunks, batches = self._chunks[free], self._next[Kind.FORWARD][free]
        known = np.minimum(batches, self._micro_batches - 1)
        is_ready = (self._input_at[chunks, known] <= time) & (self._alive[free, None] < self._room[free])
        slots = np.arange(chunks.shape[1])
        order = batches // self._group * chunks.shape[1] + slots if self._is_loop else -slots
        return np.where(is_ready & (batches == known), order, _NEVER)
