"""Whether the programs of all ranks fit each other: each finding names a rank and where in its step."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trident.plan.dry_run.programs import ProgramEntry, Programs, RankProgram, moved
from trident.plan.dry_run.recording import RECEIVE, SEND, RankMessage, shown_ranks

_Group = tuple[int, ...]
_Step = tuple[str, str, str]  # kind, size, and what it is part of


def group_problems(programs: Programs) -> Iterator[str]:
    """Ranks whose groups are not those that the others of the group have."""
    walked = {rank: set(program.groups.values()) for rank, program in programs.walked.items()}
    for program in programs.odd.values():
        first = programs.class_of(program.rank)
        expected = {moved(ranks, first, program.rank) for ranks in walked[first]}
        for name, ranks in program.groups.items():
            if ranks not in expected:
                shown = shown_ranks(ranks)
                yield f"rank {program.rank}: its group {name} has ranks {shown}, which the others do not have"


def collective_problems(programs: Programs) -> Iterator[str]:
    """Ranks that do not send what the others of a group send, at the first message that differs."""
    classes = {rank: _collectives(program) for rank, program in programs.walked.items()}
    odd = {rank: _collectives(program) for rank, program in programs.odd.items()}
    seen: set[tuple[int, _Group]] = set()
    for first, own in classes.items():
        for group, steps in own.items():
            for delta in _copies(programs, group):
                ranks = tuple(rank + delta for rank in group)
                leader = first + delta
                if (leader, ranks) in seen:
                    continue
                for rank in ranks:
                    seen.add((rank, ranks))
                    theirs = _sequence_of(programs, classes, odd, rank, ranks)
                    if theirs is not steps and (theirs is None or _steps(theirs) != _steps(steps)):
                        sound = next((each for each in ranks if each not in odd), leader)
                        yield _difference(rank, theirs or [], sound, steps, ranks)
    for rank, own in odd.items():
        first = programs.class_of(rank)
        expected = {moved(group, first, rank) for group in classes[first]}
        for group, steps in own.items():
            if group not in expected:
                place, message, part = steps[0]
                yield f"rank {rank}, message {place} ({part}): {message}: the other ranks of its group take no part"


def split_problems(programs: Programs) -> Iterator[str]:
    """Rows of an all-to-all of which one rank sends another number than the other takes."""
    classes = {rank: _collectives(program) for rank, program in programs.walked.items()}
    odd = {rank: _collectives(program) for rank, program in programs.odd.items()}
    for rank, own in (*classes.items(), *odd.items()):
        for group, steps in own.items():
            for place, other in enumerate(group):
                theirs = _sequence_of(programs, classes, odd, other, group) or []
                for (number, mine, part), (_, message, _) in zip(steps, theirs, strict=False):
                    taken = message.taken[group.index(rank)] if message.taken else 0
                    if mine.sent and mine.sent[place] != taken:
                        yield (
                            f"rank {rank}, message {number} ({part}): {mine} sends {mine.sent[place]:,} rows to rank "
                            f"{other}, which takes {taken:,}"
                        )
                        break


def peer_problems(programs: Programs) -> Iterator[str]:
    """Messages between two ranks that do not meet what the other end waits for."""
    checked: set[tuple[int, int]] = set()
    ends = {program.rank: _between(program) for program in programs.representatives()}
    ranks = set(programs.walked) | _near(programs, programs.odd)
    for rank in sorted(ranks):
        own = ends.get(rank) or _between(programs.of(rank))
        for other in own:
            if (rank, other) in checked:
                continue
            checked |= {(rank, other), (other, rank)}
            theirs = (ends.get(other) or _between(programs.of(other))).get(rank, {})
            for kind, converse in ((SEND, RECEIVE), (RECEIVE, SEND)):
                mine, wanted = own[other].get(kind, []), theirs.get(converse, [])
                yield from _unmet(rank, mine, other, wanted, kind)


def _unmet(
    rank: int,
    mine: Sequence[tuple[int, ProgramEntry]],
    other: int,
    theirs: Sequence[tuple[int, ProgramEntry]],
    kind: str,
) -> Iterator[str]:
    for own, their in itertools.zip_longest(mine, theirs):
        if own is None:
            yield f"rank {other}, message {their[0]}: {their[1].message} ({their[1].part}): rank {rank} has none for it"
            return
        if their is None:
            yield f"rank {rank}, message {own[0]}: {own[1].message} ({own[1].part}): rank {other} has none for it"
            return
        same = own[1].part == their[1].part and own[1].message.size == their[1].message.size
        if not same:
            yield (
                f"rank {rank}, message {own[0]}: {kind} of the {own[1].part} ({own[1].message.size}), where rank "
                f"{other}, message {their[0]}, has the {their[1].part} ({their[1].message.size})"
            )
            return


def _near(programs: Programs, odd: Iterable[int]) -> set[int]:
    """Ranks that differ from their class, and those they exchange messages with."""
    near = set()
    for rank in odd:
        near.add(rank)
        near |= {event.message.ranks[1] for event in programs.of(rank).events if not event.message.is_collective}
    return near


_Steps = list[tuple[int, RankMessage, str]]  # place in the program, message, part


def _collectives(program: RankProgram) -> dict[_Group, _Steps]:
    """The collectives of a program by group, each with its place among all messages."""
    found: dict[_Group, _Steps] = defaultdict(list)
    for place, (message, part) in enumerate(program.events):
        if message.is_collective:
            found[message.ranks].append((place, message, part))
    return dict(found)


def _between(program: RankProgram) -> dict[int, dict[str, list[tuple[int, ProgramEntry]]]]:
    """The messages of a program to and from single ranks, by rank and kind."""
    found: dict[int, dict[str, list[tuple[int, ProgramEntry]]]] = defaultdict(lambda: defaultdict(list))
    for place, event in enumerate(program.events):
        if not event.message.is_collective:
            found[event.message.ranks[1]][event.message.kind].append((place, event))
    return found


def _copies(programs: Programs, group: _Group) -> Iterable[int]:
    """By how much the group of a walked rank lies further for the others of its class; once if it has them all."""
    own = programs.class_of(group[0])
    spans = any(programs.class_of(rank) == own for rank in group[1:])
    return (0,) if spans else range(0, programs.stride * programs.replicas, programs.stride)


def _sequence_of(
    programs: Programs,
    classes: Mapping[int, dict[_Group, _Steps]],
    odd: Mapping[int, dict[_Group, _Steps]],
    rank: int,
    ranks: _Group,
) -> _Steps | None:
    if rank in odd:
        return odd[rank].get(ranks)
    first = programs.class_of(rank)
    there = classes[first].get(ranks) if first in ranks or rank == first else None
    return there if there is not None else classes[first].get(tuple(each - rank + first for each in ranks))


def _steps(steps: _Steps) -> list[_Step]:
    return [(message.kind, message.size, part) for _, message, part in steps]


def _difference(rank: int, own: _Steps, leader: int, theirs: _Steps, ranks: _Group) -> str:
    """The first message in which two ranks of a group differ."""
    pairs = itertools.zip_longest(own, theirs)
    mine, other = next(
        pair for pair in pairs if pair[0] is None or pair[1] is None or _steps([pair[0]]) != _steps([pair[1]])
    )
    if mine is None:
        place, message, part = other
        return (
            f"rank {rank} ends without the {message.kind} of {message.size} ({part}) over ranks {shown_ranks(ranks)} "
            f"that rank {leader} begins as message {place}"
        )
    place, message, part = mine
    if other is None:
        return (
            f"rank {rank}, message {place} ({part}): {message.kind} of {message.size} over ranks {shown_ranks(ranks)}, "
            f"which rank {leader} does not take part in"
        )
    return (
        f"rank {rank}, message {place} ({part}): {message.kind} of {message.size} over ranks {shown_ranks(ranks)}, "
        f"where rank {leader} has {other[1].kind} of {other[1].size} ({other[2]}, message {other[0]})"
    )
