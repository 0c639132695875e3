"""The vocabulary of pipeline schedules: what a rank does, where the chunks of the network are, and whole programs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Kind(Enum):
    """What an action does to its chunk and micro-batch.

    A chunk's backward pass is one action, or two: the gradient of its input, which the previous chunk waits for, and
    later the gradients of its weights, for which nobody waits. SEND_FORWARD sends the output of its chunk and
    RECEIVE_FORWARD receives its input; SEND_BACKWARD sends the gradient of its input and RECEIVE_BACKWARD receives
    that of its output.

    Source: the two halves are from Qi et al., "Zero Bubble Pipeline Parallelism" (2023), section 2.
    """

    FORWARD = "F"
    BACKWARD = "B"
    INPUT_BACKWARD = "I"
    WEIGHT_BACKWARD = "W"
    SEND_FORWARD = "SF"
    RECEIVE_FORWARD = "RF"
    SEND_BACKWARD = "SB"
    RECEIVE_BACKWARD = "RB"

    @property
    def is_message(self) -> bool:
        """Whether it crosses ranks instead of computing."""
        return len(self.value) == 2

    @property
    def is_of_backward(self) -> bool:
        """Whether a pass without gradients leaves it out."""
        return self not in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)


@dataclass(frozen=True)
class Action:
    """One step of a rank's program.

    Attributes:
        chunk: the chunk's place in the whole network, from 0.
        micro_batch: from 0.
        peer: the pipeline rank at the other end of a message; None for a computation.
    """

    kind: Kind
    chunk: int
    micro_batch: int
    peer: int | None = None

    def __str__(self) -> str:
        return f"{self.chunk}{self.kind.value}{self.micro_batch}"


@dataclass(frozen=True)
class Placement:
    """Which pipeline rank holds which chunk of the network.

    Attributes:
        owners: the pipeline rank of each chunk, in the order of the network.
    """

    owners: tuple[int, ...]

    @classmethod
    def loop(cls, ranks: int, chunks_per_rank: int) -> Placement:
        """Chunks in the order of the ranks, again and again; with one chunk a rank, the plain pipeline."""
        return cls(tuple(range(ranks)) * chunks_per_rank)

    @classmethod
    def v_shape(cls, ranks: int) -> Placement:
        """Two chunks a rank, there and back: the first rank holds the beginning and the end of the network."""
        return cls((*range(ranks), *reversed(range(ranks))))

    @property
    def chunks(self) -> int:
        """The number of chunks of the network."""
        return len(self.owners)

    @cached_property
    def ranks(self) -> int:
        return max(self.owners) + 1

    def owner(self, chunk: int) -> int:
        """The pipeline rank that holds a chunk."""
        return self.owners[chunk]

    def chunks_of(self, rank: int) -> tuple[int, ...]:
        """The chunks of a rank, in the order of the network."""
        return self._chunks_by_rank[rank]

    @cached_property
    def _chunks_by_rank(self) -> tuple[tuple[int, ...], ...]:
        return tuple(
            tuple(chunk for chunk, owner in enumerate(self.owners) if owner == rank) for rank in range(self.ranks)
        )


Program = tuple[Action, ...]


def without_backward_before(program: Program, chunk: int) -> Program:
    """A program without the backward passes of the chunks before this one, and without the gradients they would need.

    Applied to the programs of all ranks, each message still has both its ends.
    """

    def stays(action: Action) -> bool:
        needed_by = action.chunk - 1 if action.kind is Kind.SEND_BACKWARD else action.chunk
        return needed_by >= chunk or not action.kind.is_of_backward

    return tuple(filter(stays, program)) if chunk else program


@dataclass(frozen=True)
class Schedule:
    """The programs of all pipeline ranks for one step.

    Messages between two ranks have one order, the same in both programs, and the programs are consistent with one
    order of all events: executed at any speed, with sends that are waited for or not, none of them blocks forever.

    Attributes:
        chunks_per_rank: the chunks that each rank holds.
        actions: a program for each pipeline rank, messages included.
        bubble_ratio: the share of the ranks' time that is idle if a forward pass and each half of a backward pass take
            equally long and messages take no time.
        peak_alive: for each rank, the most forward passes whose activations it holds at once (of chunks, each the
            `chunks_per_rank`-th part of the rank's layers).
    """

    name: str
    ranks: int
    chunks_per_rank: int
    micro_batches: int
    placement: Placement
    actions: tuple[Program, ...]
    bubble_ratio: float
    peak_alive: tuple[int, ...]

    @property
    def orders(self) -> tuple[tuple[tuple[Kind, int, int], ...], ...]:
        """What each rank computes, without messages: kind, chunk and micro-batch."""
        return tuple(
            tuple((action.kind, action.chunk, action.micro_batch) for action in program if not action.kind.is_message)
            for program in self.actions
        )

    def forward_only(self) -> tuple[Program, ...]:
        """The programs of a pass without gradients: the same ones, without what belongs to the backward pass."""
        return self._forward_only

    @property
    def splits_backward(self) -> bool:
        """Whether the gradients of weights are computed apart from those of inputs."""
        return any(action.kind is Kind.WEIGHT_BACKWARD for action in self.actions[0])

    @property
    def stages_alive(self) -> tuple[float, ...]:
        """`peak_alive` in micro-batches of all the layers of a rank."""
        return tuple(round(alive / self.chunks_per_rank, 1) for alive in self.peak_alive)

    @cached_property
    def _forward_only(self) -> tuple[Program, ...]:
        return tuple(tuple(action for action in program if not action.kind.is_of_backward) for program in self.actions)
