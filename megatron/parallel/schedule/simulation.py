"""Runs the computations of a schedule on a clock: when each starts, who waits for whom, what is held in memory.

Computations without messages (`Orders`) are what generators make and files hold. Simulating them either yields their
times, which give the messages their order, or shows that they can never end, and why.
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

# What others wait for: whether it is the gradient of a chunk's input or else its output, the chunk, the micro-batch.
Result = tuple[bool, int, int]


@dataclass(frozen=True)
class Span:
    """A computation and when it ran, in units of the costs."""

    rank: int
    kind: Kind
    chunk: int
    micro_batch: int
    start: float
    end: float


def shown(computation: Computation) -> str:
    """A computation in the notation of schedule files: chunk, kind, micro-batch."""
    kind, chunk, micro_batch = computation
    return f"{chunk}{kind.value}{micro_batch}"


def simulate(
    orders: Orders,
    placement: Placement,
    costs: Mapping[Kind, float] = UNIT_COSTS,
    chunk_costs: Sequence[float] = (),
) -> list[Span]:
    """Runs each rank's computations in their order, each as soon as what it needs is there.

    Args:
        orders: the computations of each rank. Every micro-batch passes every chunk forward and backward.
        chunk_costs: how many times as long as in `costs` the computations of each chunk take; empty for once.

    Returns:
        The computations by the time at which they start.

    Raises:
        ConfigError: computations wait for each other; the message names them.
    """
    ended: dict[Result, float] = {}
    waiting: dict[Result, int] = {}
    spans: list[Span] = []
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
            spans.append(Span(rank, kind, chunk, micro_batch, start, free[rank]))
            position[rank] += 1
            result = result_of((kind, chunk, micro_batch))
            if result is not None:
                ended[result] = free[rank]
                if result in waiting:
                    ready.append(waiting.pop(result))
    heads = {rank: order[at] for rank, (at, order) in enumerate(zip(position, orders, strict=True)) if at < len(order)}
    if heads:
        raise ConfigError(_deadlock(orders, heads, ended.keys(), placement))
    return sorted(spans, key=lambda span: span.start)


def needs_of(computation: Computation, chunks: int) -> list[Result]:
    """What a computation starts from."""
    kind, chunk, micro_batch = computation
    if kind is Kind.FORWARD:
        return [(False, chunk - 1, micro_batch)] if chunk else []
    if kind is Kind.WEIGHT_BACKWARD:
        return [(True, chunk, micro_batch)]
    output = (False, chunk, micro_batch)
    return [output] if chunk == chunks - 1 else [output, (True, chunk + 1, micro_batch)]


def result_of(computation: Computation) -> Result | None:
    """What others can wait for once a computation has ended."""
    kind, chunk, micro_batch = computation
    return None if kind is Kind.WEIGHT_BACKWARD else (kind is not Kind.FORWARD, chunk, micro_batch)


def _deadlock(orders: Orders, heads: Mapping[int, Computation], ended: Collection[Result], placement: Placement) -> str:
    """Names the computations that wait for each other in a circle.

    Args:
        heads: the computation that each rank is stuck at.
    """
    links: dict[int, str] = {}
    rank = min(heads)
    while rank not in links:
        head = heads[rank]
        need = next(need for need in needs_of(head, placement.chunks) if need not in ended)
        owner = placement.owner(need[1])
        wanted = next(computation for computation in orders[owner] if result_of(computation) == need)
        where = f"which comes after {shown(heads[owner])} on rank {owner}"
        links[rank] = f"{shown(head)} on rank {rank} waits for {shown(wanted)}, {where}"
        rank = owner
    circle = list(links)[list(links).index(rank) :]
    return "the schedule can never end: " + "; ".join(links[rank] for rank in circle)


def with_messages(spans: Sequence[Span], placement: Placement) -> tuple[Program, ...]:
    """The programs of all ranks: their computations, and the messages in the order in which the simulation sends them.

    A message enters the programs of both its ranks when the simulation has computed what it carries, before whatever
    starts at that time. So all programs follow one order of events, in which each event only needs earlier ones.
    """
    programs: list[list[Action]] = [[] for _ in range(placement.ranks)]
    events = [(span.end, False, index) for index, span in enumerate(spans)]
    events += [(span.start, True, index) for index, span in enumerate(spans)]
    for _, starts, index in sorted(events):
        span = spans[index]
        if starts:
            programs[span.rank].append(Action(span.kind, span.chunk, span.micro_batch))
            continue
        forward = span.kind is Kind.FORWARD
        target = span.chunk + (1 if forward else -1)
        if span.kind is Kind.WEIGHT_BACKWARD or not 0 <= target < placement.chunks:
            continue
        peer = placement.owner(target)
        if peer != span.rank:
            send, receive = (
                (Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD) if forward else (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)
            )
            programs[span.rank].append(Action(send, span.chunk, span.micro_batch, peer))
            programs[peer].append(Action(receive, target, span.micro_batch, span.rank))
    return tuple(map(tuple, programs))


def bubble_ratio(spans: Sequence[Span], ranks: int) -> float:
    """The share of all ranks' time, from the first start to the last end, in which they compute nothing."""
    total = ranks * max(span.end for span in spans)
    return (total - sum(span.end - span.start for span in spans)) / total


def peak_alive(orders: Orders) -> tuple[int, ...]:
    """For each rank the most micro-batches, counted once a chunk, whose activations it holds at the same time."""
    return tuple(max(alive_after_each(order)) for order in orders)


def alive_after_each(order: Sequence[Computation]) -> list[int]:
    """The activations that a rank holds after each of its computations."""
    change = {Kind.FORWARD: 1, Kind.BACKWARD: -1, Kind.WEIGHT_BACKWARD: -1}
    return list(accumulate(change.get(kind, 0) for kind, _, _ in order))
