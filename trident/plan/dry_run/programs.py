"""What every rank does in a step, by class of ranks: its messages in order, and what they are part of."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trident.plan.dry_run.recording import RankMessage


class ProgramEntry(NamedTuple):
    """A message and what it is part of, such as `0F3`: the forward pass of micro-batch 3 through chunk 0."""

    message: RankMessage
    part: str


@dataclass(frozen=True)
class FlatShare:
    """Tensors that lie one after the other, of which each rank of a group updates and saves an equal part.

    Attributes:
        ranks: the group.
        length: elements of all parts, padding included.
        saved: of each tensor that is saved, its first element here and one past its last.
    """

    ranks: tuple[int, ...]
    length: int
    saved: tuple[tuple[int, int], ...]

    def pieces(self) -> Counter[int]:
        """How many parts of tensors each rank saves."""
        part = -(-self.length // len(self.ranks))
        return Counter(
            self.ranks[place] for first, end in self.saved for place in range(first // part, -(-end // part))
        )


@dataclass(frozen=True)
class RankProgram:
    """What a rank does in a step.

    Attributes:
        rank: the one that was walked, or the one that differs.
        events: its messages in order.
        groups: the ranks of every group it opened, by name.
        parameters: bytes of its weights.
        shares: what it updates and saves a part of.
    """

    rank: int
    events: tuple[ProgramEntry, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: int = 0
    shares: tuple[FlatShare, ...] = ()

    def at(self, rank: int) -> RankProgram:
        """The same for another rank, which does the same with other ranks."""
        events = tuple(
            ProgramEntry(replace(message, ranks=moved(message.ranks, self.rank, rank)), part)
            for message, part in self.events
        )
        groups = {name: moved(ranks, self.rank, rank) for name, ranks in self.groups.items()}
        shares = tuple(replace(each, ranks=moved(each.ranks, self.rank, rank)) for each in self.shares)
        return RankProgram(rank, events, groups, self.parameters, shares)

    def changed(self, events: Sequence[ProgramEntry]) -> RankProgram:
        return replace(self, events=tuple(events))


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks.

    Ranks are of one class if they have the same stage, the same part of the tensors, of the sequences and of the
    experts: they do the same on other samples.

    Attributes:
        size: the number of ranks.
        stride: the ranks that lie between two ranks of a class with neighbouring samples.
        replicas: how many ranks a class has.
        walked: the program of a rank of each class, by that rank.
        odd: programs of single ranks that are not those of their class.
    """

    size: int
    stride: int
    replicas: int
    walked: Mapping[int, RankProgram]
    odd: Mapping[int, RankProgram] = field(default_factory=dict)

    def class_of(self, rank: int) -> int:
        """The rank that was walked for a rank."""
        span = self.stride * self.replicas
        return rank // span * span + rank % self.stride

    def of(self, rank: int) -> RankProgram:
        """The program of a rank, with its own ranks in it."""
        if rank in self.odd:
            return self.odd[rank]
        first = self.class_of(rank)
        return self.walked[first] if rank == first else self.walked[first].at(rank)

    def saved_pieces(self) -> Counter[int]:
        """How many parts of tensors each rank saves, by rank; once of those that ranks hold copies of."""
        shares = {
            (share.ranks, place): share for each in self.walked.values() for place, share in enumerate(each.shares)
        }
        return sum((share.pieces() for share in shares.values()), Counter())

    def with_deviating(self, *programs: RankProgram) -> Programs:
        """The same, but for those of these ranks that do something else than their class."""
        unlike = {each.rank: each for each in programs if each != self.of(each.rank)}
        return replace(self, odd={**self.odd, **unlike})

    def representatives(self) -> Iterator[RankProgram]:
        """One program of each class, then those that differ."""
        yield from self.walked.values()
        yield from self.odd.values()


def moved(ranks: tuple[int, ...], first: int, rank: int) -> tuple[int, ...]:
    """A group of the rank `first`, as it is for another rank of its class: the same one if both are in it."""
    return ranks if rank in ranks else tuple(each + rank - first for each in ranks)
