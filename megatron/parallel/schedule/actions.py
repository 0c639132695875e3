"""The data types of pipeline schedules: actions, the placement of chunks, and programs."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property


class Kind(Enum):
    """The kind of an action.

    A chunk's backward pass is one action, or two: the gradient of its input, which the previous chunk waits for, and
    later the gradients of its weights, which no chunk waits for. SEND_FORWARD sends the output of its chunk, and
    RECEIVE_FORWARD receives its input; SEND_BACKWARD sends the gradient of its input, and RECEIVE_BACKWARD receives
    the gradient of its output.

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
        """True for messages, False for computations."""
        return len(self.value) == 2

    @property
    def is_of_backward(self) -> bool:
        """True for actions of the backward pass."""
        return self not in (Kind.FORWARD, Kind.SEND_FORWARD, Kind.RECEIVE_FORWARD)


@dataclass(frozen=True)
class Action:
    """One step of a rank's program.

    Attributes:
        chunk: the chunk's index in the network, from 0.
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
    """The placement of chunks on pipeline ranks.

    Attributes:
        owners: the pipeline rank of each chunk, in the order of the network.
    """

    owners: tuple[int, ...]

    @classmethod
    def loop(cls, ranks: int, chunks_per_rank: int) -> Placement:
        """Round-robin placement; with one chunk per rank, the plain pipeline."""
        return cls(tuple(range(ranks)) * chunks_per_rank)

    @classmethod
    def v_shape(cls, ranks: int) -> Placement:
        """Two chunks per rank in a V: the first rank holds the first and the last chunk."""
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
    """Removes the backward passes of the chunks before `chunk` from a program, and the gradients sent to them.

    Must be applied to the programs of all ranks, so that sends and receives still match.
    """

    def stays(action: Action) -> bool:
        needed_by = action.chunk - 1 if action.kind is Kind.SEND_BACKWARD else action.chunk
        return needed_by >= chunk or not action.kind.is_of_backward

    return tuple(filter(stays, program)) if chunk else program


@dataclass(frozen=True)
class Schedule:
    """The programs of all pipeline ranks for one step.

    Free of deadlock at any speed, with blocking or non-blocking sends: all programs are consistent with one order of
    events, and messages between two ranks have the same order in both programs.

    Attributes:
        chunks_per_rank: number of chunks on each rank.
        actions: a program for each pipeline rank, messages included.
        bubble_ratio: the idle share of the ranks' time if a forward pass and each half of a backward pass take equally
            long and messages take no time.
        peak_alive: for each rank, the peak number of forward passes of chunks whose activations it holds.
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
        """The computations of each rank, without messages: kind, chunk and micro-batch."""
        return tuple(
            tuple((action.kind, action.chunk, action.micro_batch) for action in program if not action.kind.is_message)
            for program in self.actions
        )

    def forward_only(self) -> tuple[Program, ...]:
        """The programs without actions of the backward pass."""
        return self._forward_only

    @property
    def splits_backward(self) -> bool:
        """True if weight gradients are computed separately from input gradients."""
        return any(action.kind is Kind.WEIGHT_BACKWARD for action in self.actions[0])

    @property
    def stages_alive(self) -> tuple[float, ...]:
        """`peak_alive` in micro-batches of all of a rank's layers."""
        return tuple(round(alive / self.chunks_per_rank, 1) for alive in self.peak_alive)

    @cached_property
    def _forward_only(self) -> tuple[Program, ...]:
        return tuple(tuple(action for action in program if not action.kind.is_of_backward) for program in self.actions)
