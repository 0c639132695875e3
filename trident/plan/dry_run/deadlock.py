"""Whether the ranks can send their messages to the end: none waits for another one that waits for it.

Each rank is taken to begin a message only when the one before it is over, and a message to be over when all its ranks
have begun it. Libraries overlap some messages, as far as their buffers and the device have room for them; a run whose
ranks meet without that does not depend on it. Only messages between two ranks that follow each other in one pass, as
around a ring, are begun together.

Ranks of a class do the same at the same time, so that one of each is enough, unless some rank differs from its class.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from trident.plan.dry_run.programs import ProgramEntry, Programs
from trident.plan.dry_run.recording import SEND, RankMessage

_MOST_SHOWN = 6


class _Meeting(NamedTuple):
    """Which ranks meet, of those that are simulated; the same for all of them.

    Attributes:
        is_collective: all do the same; or the first of two sends to the second.
        group: the ranks of the message, of that copy of it that the simulated ranks take part in.
        ranks: those that are simulated.
    """

    is_collective: bool
    group: tuple[int, ...]
    ranks: tuple[int, ...]


def order_problems(programs: Programs) -> Iterator[str]:
    """The first circle of ranks of which each waits for the next one; if there is none, ranks that take up the messages
    of several groups in another order than their class.

    Such a rank ends here, and may still hang where a library has one order for all groups of a device.
    """
    simulation = _Simulation(programs)
    circle = simulation.circle(simulation.run())
    if circle:
        shown = "; ".join(simulation.shown(rank) for rank in circle[:_MOST_SHOWN])
        more = f"; and {len(circle) - _MOST_SHOWN} more" if len(circle) > _MOST_SHOWN else ""
        yield f"{shown}{more}: each waits for the next one, the last for rank {circle[0]}, which may hang the run"
        return
    for rank, program in programs.odd.items():
        usual = programs.walked[programs.class_of(rank)].at(rank).events
        for place, (own, other) in enumerate(zip(program.events, usual, strict=False)):
            if own != other:
                yield (
                    f"rank {rank}, message {place} ({own.part}): {own.message}, where the other ranks of its class "
                    f"have {other.message} ({other.part})"
                )
                break


class _Simulation:
    """Ranks that go from message to message."""

    def __init__(self, programs: Programs) -> None:
        self._programs = programs
        ranks = range(programs.size) if programs.odd else sorted(programs.walked)
        self._events: dict[int, Sequence[ProgramEntry]] = {rank: programs.of(rank).events for rank in ranks}
        self._at = dict.fromkeys(self._events, 0)  # the first message that a rank has begun and not ended
        self._open: dict[int, int] = {}  # how many it has begun and not ended
        self._waiting: dict[_Meeting, Counter[int]] = defaultdict(Counter)  # messages begun by each rank
        self._meetings: dict[tuple[bool, tuple[int, ...]], _Meeting] = {}

    def run(self) -> list[int]:
        """Goes as far as the ranks can; returns those that are not at their end."""
        moving = list(self._events)
        while moving:
            moving += self._begin(moving.pop())
        return [rank for rank, events in self._events.items() if self._at[rank] < len(events)]

    def circle(self, stuck: Sequence[int]) -> list[int]:
        """Ranks of which each waits for the next and the last for the first, with one that differs from its class."""
        for first in sorted(stuck, key=lambda rank: (rank not in self._programs.odd, rank)):
            path = [first]
            while (absent := self._awaited_by(path[-1])) is not None:
                if absent in path:
                    return path[path.index(absent) :]
                path.append(absent)
        return []

    def shown(self, rank: int) -> str:
        """What a rank waits in."""
        message, part = self._events[rank][self._at[rank]]
        return f"rank {rank}, message {self._at[rank]} ({part}): {message}"

    def _begin(self, rank: int) -> Iterator[int]:
        """Begins the next messages of a rank; returns the ranks that have ended theirs by that."""
        messages = self._together(rank)
        self._open[rank] = len(messages)
        for message in messages:
            meeting = self._meeting(message)
            there = self._waiting[meeting]
            there[rank] += 1
            if len(there) == len(meeting.ranks):
                for each in meeting.ranks:
                    there[each] -= 1
                    if not there[each]:
                        del there[each]
                    self._open[each] -= 1
                    if not self._open[each]:
                        self._at[each] += len(self._together(each))
                        yield each

    def _together(self, rank: int) -> Sequence[RankMessage]:
        """The messages of a rank that it begins next: one, or those of a pass between two ranks each."""
        first, events = self._at[rank], self._events[rank]
        last = min(first + 1, len(events))
        while last < len(events) and not (events[first].message.is_collective or events[last].message.is_collective):
            if events[last].part != events[first].part:
                break
            last += 1
        return [message for message, _ in events[first:last]]

    def _awaited_by(self, rank: int) -> int | None:
        """The first rank that has not begun what another one waits in; None if that rank is at its end."""
        for message in self._together(rank):
            there = self._waiting[self._meeting(message)]
            if rank in there:
                return next(each for each in self._meeting(message).ranks if each not in there)
        return None

    def _meeting(self, message: RankMessage) -> _Meeting:
        is_reversed = not message.is_collective and message.kind != SEND
        group = message.ranks[::-1] if is_reversed else message.ranks
        known = self._meetings.get((message.is_collective, group))
        if known is None:
            known = self._meetings[message.is_collective, group] = self._located(message.is_collective, group)
        return known

    def _located(self, is_collective: bool, group: tuple[int, ...]) -> _Meeting:
        if self._programs.odd:
            return _Meeting(is_collective, group, group)
        classes = [self._programs.class_of(rank) for rank in group]
        if len(set(classes)) == len(group):  # copies of it lie at other places of each class
            first = min(rank - own for rank, own in zip(group, classes, strict=True))
            group = tuple(rank - first for rank in group)
        return _Meeting(is_collective, group, tuple(sorted(set(classes))))
