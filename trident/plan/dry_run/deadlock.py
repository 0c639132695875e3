"""Checks that the messages of all ranks complete without a deadlock.

Every message is assumed to block: a rank starts it after the previous one is complete, and it is complete when all its
ranks have started it. Libraries may buffer messages, but a run should not depend on it. Only consecutive sends and
receives of one pass, as around a ring, are started together.

Ranks of a class do the same, so that one rank of each is simulated, unless a rank deviates from its class.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trident.plan.dry_run.programs import ProgramEntry, Programs
from trident.plan.dry_run.recording import SEND, RankMessage

_MOST_SHOWN = 6


class _Rendezvous(NamedTuple):
    """The ranks that must start a message.

    Attributes:
        is_collective: otherwise the first of two ranks sends to the second.
        group: the ranks of the message, in the copy of it with simulated ranks.
        ranks: the simulated ranks.
    """

    is_collective: bool
    group: tuple[int, ...]
    ranks: tuple[int, ...]


def order_problems(programs: Programs) -> Iterator[str]:
    """The first cycle of ranks that wait for each other; without one, ranks with another order of messages than their
    class.
    """
    replay = _Replay(programs)
    cycle = replay.cycle(replay.run())
    if cycle:
        shown = "; ".join(replay.wait_text(rank) for rank in cycle[:_MOST_SHOWN])
        more = f"; and {len(cycle) - _MOST_SHOWN} more" if len(cycle) > _MOST_SHOWN else ""
        yield f"{shown}{more}: each waits for the next one, the last for rank {cycle[0]}, which may hang the run"
        return
    # Another order completes here, but may hang where a library orders the messages of all groups of a device.
    for rank, program in programs.deviating.items():
        expected = programs.simulated[programs.class_of(rank)].at(rank).events
        for index, (entry, other) in enumerate(zip(program.events, expected, strict=False)):
            if entry != other:
                yield (
                    f"rank {rank}, message {index} ({entry.part}): {entry.message}, where the other ranks of its class "
                    f"have {other.message} ({other.part})"
                )
                break


class _Replay:
    """Replays the messages of ranks."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        ranks = range(programs.size) if programs.deviating else sorted(programs.simulated)
        self._events: dict[int, Sequence[ProgramEntry]] = {rank: programs.of(rank).events for rank in ranks}
        self._at = dict.fromkeys(self._events, 0)  # index of the first incomplete message of a rank
        self._open: dict[int, int] = {}  # number of started, incomplete messages
        self._waiting: dict[_Rendezvous, Counter[int]] = defaultdict(Counter)  # messages started by each rank
        self._rendezvous_by_group: dict[tuple[bool, tuple[int, ...]], _Rendezvous] = {}

    def run(self) -> list[int]:
        """Replays as many messages as possible; returns the ranks that are stuck."""
        ready = list(self._events)
        while ready:
            ready += self._start(ready.pop())
        return [rank for rank, events in self._events.items() if self._at[rank] < len(events)]

    def cycle(self, stuck: Sequence[int]) -> list[int]:
        """A cycle of ranks that wait for each other, preferably from a deviating rank."""
        for first in sorted(stuck, key=lambda rank: (rank not in self._programs.deviating, rank)):
            path = [first]
            while (absent := self._rank_awaited_by(path[-1])) is not None:
                if absent in path:
                    return path[path.index(absent) :]
                path.append(absent)
        return []

    def wait_text(self, rank: int) -> str:
        """Describes the message a rank waits in."""
        message, part = self._events[rank][self._at[rank]]
        return f"rank {rank}, message {self._at[rank]} ({part}): {message}"

    def _start(self, rank: int) -> Iterator[int]:
        """Starts the next messages of a rank; returns the ranks whose messages this completes."""
        messages = self._next_messages(rank)
        self._open[rank] = len(messages)
        for message in messages:
            rendezvous = self._rendezvous(message)
            started = self._waiting[rendezvous]
            started[rank] += 1
            if len(started) == len(rendezvous.ranks):
                for each in rendezvous.ranks:
                    started[each] -= 1
                    if not started[each]:
                        del started[each]
                    self._open[each] -= 1
                    if not self._open[each]:
                        self._at[each] += len(self._next_messages(each))
                        yield each

    def _next_messages(self, rank: int) -> Sequence[RankMessage]:
        """The messages that a rank starts together: one, or all sends and receives of a pass."""
        first, events = self._at[rank], self._events[rank]
        last = min(first + 1, len(events))
        while last < len(events) and not (events[first].message.is_collective or events[last].message.is_collective):
            if events[last].part != events[first].part:
                break
            last += 1
        return [message for message, _ in events[first:last]]

    def _rank_awaited_by(self, rank: int) -> int | None:
        """The first rank missing from the message a rank waits in; None if that rank is finished."""
        for message in self._next_messages(rank):
            started = self._waiting[self._rendezvous(message)]
            if rank in started:
                return next(each for each in self._rendezvous(message).ranks if each not in started)
        return None

    def _rendezvous(self, message: RankMessage) -> _Rendezvous:
        is_reversed = not message.is_collective and message.kind != SEND
        group = message.ranks[::-1] if is_reversed else message.ranks
        key = message.is_collective, group
        if key not in self._rendezvous_by_group:
            self._rendezvous_by_group[key] = self._simulated_rendezvous(*key)
        return self._rendezvous_by_group[key]

    def _simulated_rendezvous(self, is_collective: bool, group: tuple[int, ...]) -> _Rendezvous:
        if self._programs.deviating:
            return _Rendezvous(is_collective, group, group)
        classes = [self._programs.class_of(rank) for rank in group]
        if len(set(classes)) == len(group):  # each replica has its own copy of the group
            offset = min(rank - first for rank, first in zip(group, classes, strict=True))
            group = tuple(rank - offset for rank in group)
        return _Rendezvous(is_collective, group, tuple(sorted(set(classes))))
