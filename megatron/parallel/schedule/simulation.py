"""Simulates the computations of a schedule: their times, deadlocks, and activations in memory.

Generators and files specify computations without messages (`Orders`). The simulation yields their times, which give the
order of messages, or explains a deadlock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

from megatron.errors import ConfigError
from megatron.parallel.schedule.actions import Action, Kind, Placement, Program

# A computation: its kind, chunk and micro-batch. BACKWARD computes the gradients of inputs and of weights.
Computation = tuple[Kind, int, int]
Orders = Sequence[Sequence[Computation]]

UNIT_COSTS: Mapping[Kind, float] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT_BACKWARD: 1,
    Kind.WEIGHT_BACKWARD: 1,
}

# A result that computations wait for: True for a chunk's input gradient, False for its output; chunk; micro-batch.
Result = tuple[bool, int, int]


@dataclass(frozen=True)
class TimedComputation:
    """A computation with its start and end, in units of the costs."""

    rank: int
    kind: Kind
    chunk: int
    micro_batch: int
    start: float
    end: float


def shown(computation: Computation) -> str:
    """Formats a computation as in schedule files: chunk, kind, micro-batch."""
    kind, chunk, micro_batch = computation
    return f"{chunk}{kind.value}{micro_batch}"


def simulate(
    orders: Orders,
    placement: Placement,
    costs: Mapping[Kind, float] = UNIT_COSTS,
    chunk_costs: Sequence[float] = (),
) -> list[TimedComputation]:
    """Runs each rank's computations in order, each as soon as its inputs are available.

    Args:
        orders: the computations of each rank. Every micro-batch passes every chunk forward and backward.
        chunk_costs: factors of `costs` for the computations of each chunk; empty for 1.

    Returns:
        The computations by start time.

    Raises:
        ConfigError: the computations deadlock; the message names the cycle.
    """
    ended: dict[Result, float] = {}
    waiting: dict[Result, int] = {}
    timeline: list[TimedComputation] = []
    position, free = [0] * len(orders), [0.0] * len(orders)
    ready = list(range(len(orders)))
    while ready:
        rank = ready.pop()
        for kind, chunk, micro_batch in orders[rank][position[rank] :]:
            needs = needs_of((kind, chunk, micro_batch), placement.chunks)
            missing = next((need for need in needs if need not in ended), None)
            if missing is not None:
                waiting[missing] = rank
                break
            start = max([free[rank], *(ended[need] for need in needs)])
            free[rank] = start + costs[kind] * (chunk_costs[chunk] if chunk_costs else 1)
            timeline.append(TimedComputation(rank, kind, chunk, micro_batch, start, free[rank]))
            position[rank] += 1
            result = result_of((kind, chunk, micro_batch))
            if result is not None:
                ended[result] = free[rank]
                if result in waiting:
                    ready.append(waiting.pop(result))
    heads = {rank: order[at] for rank, (at, order) in enumerate(zip(position, orders, strict=True)) if at < len(order)}
    if heads:
        raise ConfigError(_deadlock(orders, heads, ended.keys(), placement))
    return sorted(timeline, key=lambda each: each.start)


def needs_of(computation: Computation, chunks: int) -> list[Result]:
    """The results that a computation needs."""
    kind, chunk, micro_batch = computation
    if kind is Kind.FORWARD:
        return [(False, chunk - 1, micro_batch)] if chunk else []
    if kind is Kind.WEIGHT_BACKWARD:
        return [(True, chunk, micro_batch)]
    output = (False, chunk, micro_batch)
    return [output] if chunk == chunks - 1 else [output, (True, chunk + 1, micro_batch)]


def result_of(computation: Computation) -> Result | None:
    """The result of a computation that others may wait for."""
    kind, chunk, micro_batch = computation
    return None if kind is Kind.WEIGHT_BACKWARD else (kind is not Kind.FORWARD, chunk, micro_batch)


def _deadlock(orders: Orders, heads: Mapping[int, Computation], ended: Collection[Result], placement: Placement) -> str:
    """Describes a cycle of computations that wait for each other.

    Args:
        heads: the blocked computation of each rank.
    """
    links: dict[int, str] = {}
    rank = min(heads)
    while rank not in links:
        head = heads[rank]
        need = next(need for need in needs_of(head, placement.chunks) if need not in ended)
        owner = placement.owner(need[1])
        source = next(computation for computation in orders[owner] if result_of(computation) == need)
        reason = f"which comes after {shown(heads[owner])} on rank {owner}"
        links[rank] = f"{shown(head)} on rank {rank} waits for {shown(source)}, {reason}"
        rank = owner
    cycle = list(links)[list(links).index(rank) :]
    return "the schedule deadlocks: " + "; ".join(links[rank] for rank in cycle)


def with_messages(timeline: Sequence[TimedComputation], placement: Placement) -> tuple[Program, ...]:
    """The programs of all ranks: their computations, and messages in the order of the simulation.

    A message is added to both programs when its content has been computed, before any computation that starts at that
    time. So all programs follow one order of events, and each event depends only on earlier ones.
    """
    programs: list[list[Action]] = [[] for _ in range(placement.ranks)]
    events = [(each.end, False, index) for index, each in enumerate(timeline)]
    events += [(each.start, True, index) for index, each in enumerate(timeline)]
    for _, starts, index in sorted(events):
        timed = timeline[index]
        if starts:
            programs[timed.rank].append(Action(timed.kind, timed.chunk, timed.micro_batch))
            continue
        forward = timed.kind is Kind.FORWARD
        target = timed.chunk + (1 if forward else -1)
        if timed.kind is Kind.WEIGHT_BACKWARD or not 0 <= target < placement.chunks:
            continue
        peer = placement.owner(target)
        if peer != timed.rank:
            send, receive = (
                (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD) if forward else (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)
            )
            programs[timed.rank].append(Action(send, timed.chunk, timed.micro_batch, peer))
            programs[peer].append(Action(receive, target, timed.micro_batch, timed.rank))
    return tuple(map(tuple, programs))


def bubble_ratio(timeline: Sequence[TimedComputation], ranks: int) -> float:
    """The idle share of all ranks' time, from the first start to the last end."""
    total = ranks * max(each.end for each in timeline)
    return (total - sum(each.end - each.start for each in timeline)) / total


def peak_alive(orders: Orders) -> tuple[int, ...]:
    """The peak number of chunk activations on each rank."""
    return tuple(max(alive_after_each(order)) for order in orders)


def alive_after_each(order: Sequence[Computation]) -> list[int]:
    """The number of chunk activations on a rank after each of its computations."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_BACKWARD: -1}
    return list(accumulate(change.get(kind, 0) for kind, _, _ in order))
