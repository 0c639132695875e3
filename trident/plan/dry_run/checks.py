"""Checks that the programs of all ranks match: each problem names a rank and a message."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from trident.plan.dry_run.programs import ProgramEntry, Programs, RankProgram, shifted
from trident.plan.dry_run.recording import RECEIVE, SEND, RankMessage, ranks_text

_Group = tuple[int, ...]
_Step = tuple[str, str, str]  # kind, size, part


def group_problems(programs: Programs) -> Iterator[str]:
    """Groups that differ between their members."""
    simulated = {rank: set(program.groups.values()) for rank, program in programs.simulated.items()}
    for program in programs.deviating.values():
        first = programs.class_of(program.rank)
        expected = {shifted(ranks, first, program.rank) for ranks in simulated[first]}
        for name, ranks in program.groups.items():
            if ranks not in expected:
                shown = ranks_text(ranks)
                yield f"rank {program.rank}: its group {name} has ranks {shown}, which the others do not have"


def collective_problems(programs: Programs) -> Iterator[str]:
    """The first collectives that differ between ranks of a group."""
    classes = {rank: _collectives(program) for rank, program in programs.simulated.items()}
    deviating = {rank: _collectives(program) for rank, program in programs.deviating.items()}
    seen: set[tuple[int, _Group]] = set()
    for first, by_group in classes.items():
        for group, steps in by_group.items():
            for delta in _copies(programs, group):
                ranks = tuple(rank + delta for rank in group)
                leader = first + delta
                if (leader, ranks) in seen:
                    continue
                for rank in ranks:
                    seen.add((rank, ranks))
                    theirs = _sequence_of(programs, classes, deviating, rank, ranks)
                    if theirs is not steps and (theirs is None or _steps(theirs) != _steps(steps)):
                        reference = next((each for each in ranks if each not in deviating), leader)
                        yield _difference(rank, theirs or [], reference, steps, ranks)
    for rank, by_group in deviating.items():
        first = programs.class_of(rank)
        expected = {shifted(group, first, rank) for group in classes[first]}
        for group, steps in by_group.items():
            if group not in expected:
                index, message, part = steps[0]
                yield f"rank {rank}, message {index} ({part}): {message}: the other ranks of its group do not take part"


def split_problems(programs: Programs) -> Iterator[str]:
    """All-to-alls with different numbers of sent and received rows."""
    classes = {rank: _collectives(program) for rank, program in programs.simulated.items()}
    deviating = {rank: _collectives(program) for rank, program in programs.deviating.items()}
    for rank, by_group in (*classes.items(), *deviating.items()):
        for group, steps in by_group.items():
            for position, other in enumerate(group):
                theirs = _sequence_of(programs, classes, deviating, other, group) or []
                for (number, mine, part), (_, message, _) in zip(steps, theirs, strict=False):
                    received = message.received[group.index(rank)] if message.received else 0
                    if mine.sent and mine.sent[position] != received:
                        yield (
                            f"rank {rank}, message {number} ({part}): {mine} sends {mine.sent[position]:,} rows to "
                            f"rank {other}, which receives {received:,}"
                        )
                        break


def peer_problems(programs: Programs) -> Iterator[str]:
    """Sends and receives between two ranks that do not match."""
    checked: set[tuple[int, int]] = set()
    ends = {program.rank: _between(program) for program in programs.representatives()}
    ranks = set(programs.simulated) | _near(programs, programs.deviating)
    for rank in sorted(ranks):
        by_rank = ends.get(rank) or _between(programs.of(rank))
        for other in by_rank:
            if (rank, other) in checked:
                continue
            checked |= {(rank, other), (other, rank)}
            theirs = (ends.get(other) or _between(programs.of(other))).get(rank, {})
            for kind, converse in ((SEND, RECEIVE), (RECEIVE, SEND)):
                yield from _unmatched(rank, by_rank[other].get(kind, []), other, theirs.get(converse, []), kind)


def _unmatched(
    rank: int,
    mine: Sequence[tuple[int, ProgramEntry]],
    other: int,
    theirs: Sequence[tuple[int, ProgramEntry]],
    kind: str,
) -> Iterator[str]:
    for one, two in itertools.zip_longest(mine, theirs):
        if one is None:
            yield f"rank {other}, message {two[0]}: {two[1].message} ({two[1].part}): no match on rank {rank}"
            return
        if two is None:
            yield f"rank {rank}, message {one[0]}: {one[1].message} ({one[1].part}): no match on rank {other}"
            return
        if one[1].part != two[1].part or one[1].message.size != two[1].message.size:
            yield (
                f"rank {rank}, message {one[0]}: {kind} of the {one[1].part} ({one[1].message.size}), where rank "
                f"{other}, message {two[0]}, has the {two[1].part} ({two[1].message.size})"
            )
            return


def _near(programs: Programs, deviating: Iterable[int]) -> set[int]:
    """Deviating ranks, and their peers."""
    near = set()
    for rank in deviating:
        near.add(rank)
        near |= {event.message.ranks[1] for event in programs.of(rank).events if not event.message.is_collective}
    return near


_Steps = list[tuple[int, RankMessage, str]]  # index in the program, message, part


def _collectives(program: RankProgram) -> dict[_Group, _Steps]:
    """The collectives of a program by group, each with its index among all messages."""
    collectives: dict[_Group, _Steps] = defaultdict(list)
    for index, (message, part) in enumerate(program.events):
        if message.is_collective:
            collectives[message.ranks].append((index, message, part))
    return dict(collectives)


def _between(program: RankProgram) -> dict[int, dict[str, list[tuple[int, ProgramEntry]]]]:
    """The sends and receives of a program, by peer and kind."""
    messages: dict[int, dict[str, list[tuple[int, ProgramEntry]]]] = defaultdict(lambda: defaultdict(list))
    for index, event in enumerate(program.events):
        if not event.message.is_collective:
            messages[event.message.ranks[1]][event.message.kind].append((index, event))
    return messages


def _copies(programs: Programs, group: _Group) -> Iterable[int]:
    """Rank offsets of a group's copies in all replicas; only 0 if the group spans the replicas."""
    first = programs.class_of(group[0])
    has_all_replicas = any(programs.class_of(rank) == first for rank in group[1:])
    return (0,) if has_all_replicas else range(0, programs.stride * programs.replicas, programs.stride)


def _sequence_of(
    programs: Programs,
    classes: Mapping[int, dict[_Group, _Steps]],
    deviating: Mapping[int, dict[_Group, _Steps]],
    rank: int,
    ranks: _Group,
) -> _Steps | None:
    if rank in deviating:
        return deviating[rank].get(ranks)
    first = programs.class_of(rank)
    steps = classes[first].get(ranks) if first in ranks or rank == first else None
    return steps if steps is not None else classes[first].get(tuple(each - rank + first for each in ranks))


def _steps(steps: _Steps) -> list[_Step]:
    return [(message.kind, message.size, part) for _, message, part in steps]


def _difference(rank: int, steps: _Steps, leader: int, theirs: _Steps, ranks: _Group) -> str:
    """Describes the first message that differs between two ranks of a group."""
    pairs = itertools.zip_longest(steps, theirs)
    mine, other = next(
        pair for pair in pairs if pair[0] is None or pair[1] is None or _steps([pair[0]]) != _steps([pair[1]])
    )
    if mine is None:
        index, message, part = other
        return (
            f"rank {rank} ends without the {message.kind} of {message.size} ({part}) over ranks {ranks_text(ranks)} "
            f"that rank {leader} starts as message {index}"
        )
    index, message, part = mine
    if other is None:
        return (
            f"rank {rank}, message {index} ({part}): {message.kind} of {message.size} over ranks {ranks_text(ranks)}, "
            f"in which rank {leader} does not take part"
        )
    return (
        f"rank {rank}, message {index} ({part}): {message.kind} of {message.size} over ranks {ranks_text(ranks)}, "
        f"where rank {leader} has {other[1].kind} of {other[1].size} ({other[2]}, message {other[0]})"
    )
