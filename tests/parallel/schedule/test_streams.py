"""No schedule blocks on a GPU, where messages are kernels in streams and two ranks both send and receive.

NCCL runs the messages between two ranks one after the other, whichever way they go: torch gives each pair of ranks a
communicator and a stream in each group, or all pairs those of their group if it was bound to a device. A message begins
once both its ranks have come to it, and once the computations are over that were queued before it; a computation waits
for what it needs. Nothing blocks if these waits have no circle.

Source: torch, `ProcessGroupNCCL::pointToPoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from graphlib import CycleError, TopologicalSorter

import pytest

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.parallel.schedule.actions import Action, Kind, Program, without_backward_before
from megatron.parallel.schedule.building import build_schedule

Streams = Callable[[Action], Hashable]

_BACKWARD = (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD)
_SENDS = (Kind.SEND_FORWARD, Kind.SEND_BACKWARD)


def message(action: Action) -> Hashable:
    """The same for both ends: whether it is a gradient, the chunk that receives it, and the micro-batch."""
    step = (-1 if action.kind in _BACKWARD else 1) if action.kind in _SENDS else 0
    return action.kind in _BACKWARD, action.chunk + step, action.micro_batch


def needed(action: Action) -> list[Hashable]:
    """The messages that a computation may wait for."""
    if action.kind is Kind.WEIGHT_BACKWARD:
        return []
    return [(action.kind is not Kind.FORWARD, action.chunk, action.micro_batch)]


STREAMS: dict[str, Streams] = {
    "rank": lambda action: None,
    "pair": lambda action: action.peer,
    "direction": lambda action: (action.peer, action.kind in _BACKWARD),
}


def check_streams(programs: Sequence[Program], stream_of: Streams) -> None:
    """Raises CycleError if ranks wait for each other, each of which has a stream for all its messages, one for each
    rank that it talks to, or two for each of them.
    """
    waits: TopologicalSorter[Hashable] = TopologicalSorter()
    sent = {message(action) for program in programs for action in program if action.peer is not None}
    for rank, program in enumerate(programs):
        computed: list[Hashable] = []  # the last computation that was queued
        last: dict[Hashable, Hashable] = {}
        for action in program:
            if action.peer is None:
                node: Hashable = (rank, str(action))
                waits.add(node, *computed, *(need for need in needed(action) if need in sent))
                computed = [node]
                continue
            stream = stream_of(action)
            waits.add(message(action), *computed, *([last[stream]] if stream in last else []))
            last[stream] = message(action)
    waits.prepare()


@pytest.mark.parametrize("streams", STREAMS)
@pytest.mark.parametrize("name", SCHEDULE_CHUNKS)
def test_no_schedule_blocks(name: str, streams: str) -> None:
    fewest, most = SCHEDULE_CHUNKS[name]
    for chunks in {fewest, most or fewest + 1}:
        for ranks in (2, 3, 4):
            for micro_batches in (1, 2, 5, 8):
                schedule = build_schedule(name, ranks, chunks, micro_batches)
                check_streams(schedule.forward_only(), STREAMS[streams])
                for first_trained in range(schedule.placement.chunks):
                    programs = [without_backward_before(program, first_trained) for program in schedule.actions]
                    check_streams(programs, STREAMS[streams])


def test_two_ranks_that_both_send_first_block() -> None:
    programs = [list(program) for program in build_schedule("1f1b", 2, 1, 4).actions]
    place = next(at for at, action in enumerate(programs[1]) if action.kind is Kind.SEND_BACKWARD)
    later = next(at for at, action in enumerate(programs[1]) if at > place and action.kind is Kind.RECEIVE_FORWARD)
    programs[1].insert(place, programs[1].pop(later))
    with pytest.raises(CycleError):
        check_streams([tuple(program) for program in programs], STREAMS["pair"])
