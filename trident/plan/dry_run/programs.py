"""The messages of every rank in a step, by class of ranks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from trident.plan.dry_run.recording import RankMessage


class ProgramEntry(NamedTuple):
    """A message and its part of the step, such as `0F3`: the forward pass of micro-batch 3 through chunk 0."""

    message: RankMessage
    part: str


@dataclass(frozen=True)
class FlatShare:
    """Concatenated tensors; each rank of a group updates and saves an equal shard of them.

    Attributes:
        ranks: the group.
        length: total elements, including padding.
        saved: start and end of each saved tensor.
    """

    ranks: tuple[int, ...]
    length: int
    saved: tuple[tuple[int, int], ...]

    def pieces(self) -> Counter[int]:
        """The number of tensor shards that each rank saves."""
        shard = -(-self.length // len(self.ranks))
        return Counter(
            self.ranks[index] for start, end in self.saved for index in range(start // shard, -(-end // shard))
        )


@dataclass(frozen=True)
class RankProgram:
    """The messages and state of a rank in a step.

    Attributes:
        rank: the simulated rank.
        events: its messages in order.
        groups: the ranks of its process groups, by name.
        parameters: bytes of its weights.
        shares: the flat groups; it updates and saves a shard of each.
    """

    rank: int
    events: tuple[ProgramEntry, ...]
    groups: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    parameters: int = 0
    shares: tuple[FlatShare, ...] = ()

    def at(self, rank: int) -> RankProgram:
        """The program of another rank of the class."""
        events = tuple(
            ProgramEntry(replace(message, ranks=shifted(message.ranks, self.rank, rank)), part)
            for message, part in self.events
        )
        groups = {name: shifted(ranks, self.rank, rank) for name, ranks in self.groups.items()}
        shares = tuple(replace(each, ranks=shifted(each.ranks, self.rank, rank)) for each in self.shares)
        return RankProgram(rank, events, groups, self.parameters, shares)

    def with_events(self, events: Sequence[ProgramEntry]) -> RankProgram:
        return replace(self, events=tuple(events))


@dataclass(frozen=True)
class Programs:
    """The programs of all ranks.

    Ranks of a class have the same stage and the same shards of tensors, sequences and experts: they do the same with
    other samples.

    Attributes:
        size: the world size.
        stride: rank distance of neighbours in a class.
        replicas: ranks per class.
        simulated: the program of one rank of each class, by that rank.
        deviating: programs of ranks that differ from their class.
    """

    size: int
    stride: int
    replicas: int
    simulated: Mapping[int, RankProgram]
    deviating: Mapping[int, RankProgram] = field(default_factory=dict)

    def class_of(self, rank: int) -> int:
        """The simulated rank of a rank's class."""
        stage = self.stride * self.replicas
        return rank // stage * stage + rank % self.stride

    def of(self, rank: int) -> RankProgram:
        """The program of a rank."""
        if rank in self.deviating:
            return self.deviating[rank]
        first = self.class_of(rank)
        return self.simulated[first] if rank == first else self.simulated[first].at(rank)

    def saved_pieces(self) -> Counter[int]:
        """The number of tensor shards that each rank saves; replicated shards are counted once."""
        shares = {
            (share.ranks, index): share for each in self.simulated.values() for index, share in enumerate(each.shares)
        }
        return sum((share.pieces() for share in shares.values()), Counter())

    def with_deviating(self, *programs: RankProgram) -> Programs:
        """Returns a copy that also has these programs, if they differ from their class."""
        differing = {each.rank: each for each in programs if each != self.of(each.rank)}
        return replace(self, deviating={**self.deviating, **differing})

    def representatives(self) -> Iterator[RankProgram]:
        """One program of each class, then the deviating ones."""
        yield from self.simulated.values()
        yield from self.deviating.values()


def shifted(ranks: tuple[int, ...], first: int, rank: int) -> tuple[int, ...]:
    """The group of another rank of the class of `first`: the same one if both are in it."""
    return ranks if rank in ranks else tuple(each + rank - first for each in ranks)
