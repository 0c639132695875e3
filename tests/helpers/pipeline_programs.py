"""Executes the programs of a pipeline schedule without a network, and counts on nothing that the generator knows."""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Sequence

from megatron.parallel.schedule.actions import Action, Kind, Placement, Program

_SENDS = {Kind.SEND_FORWARD: Kind.RECEIVE_FORWARD, Kind.SEND_BACKWARD: Kind.RECEIVE_BACKWARD}


class ProgramError(Exception):
    """What a program does wrong."""


class Execution:
    """Ranks that take one action at a time, in an order that chance decides.

    Receives wait for their messages. Sends wait for nothing, or until the receiver has come to the receive.
    """

    def __init__(self, programs: Sequence[Program], placement: Placement, seed: int) -> None:
        self.programs, self.placement = programs, placement
        self.chance = random.Random(seed)
        self.position = [0] * len(programs)
        self.done: set[tuple[Kind, int, int]] = set()
        self.wires: dict[tuple[int, int], deque[Action]] = defaultdict(deque)
        self.there: set[tuple[bool, int, int]] = set()  # arrived: (is a gradient, chunk, micro-batch)

    def run(self, *, sends_wait: bool) -> None:
        """Runs all programs to their ends.

        Raises:
            ProgramError: no rank can go on, or one computes something before its inputs have arrived.
        """
        running = [rank for rank, program in enumerate(self.programs) if program]
        while running:
            able = [rank for rank in running if self.can_act(rank, sends_wait)]
            if not able:
                raise ProgramError(f"deadlock at {[str(self.head(rank)) for rank in running]}")
            rank = self.chance.choice(able)
            self.act(rank)
            running = [rank for rank in running if self.position[rank] < len(self.programs[rank])]
        if any(self.wires.values()):
            raise ProgramError("messages that nobody receives")

    def head(self, rank: int) -> Action:
        return self.programs[rank][self.position[rank]]

    def can_act(self, rank: int, sends_wait: bool) -> bool:
        action = self.head(rank)
        if action.peer is None:
            return True
        if action.kind in _SENDS:
            return not sends_wait or self.receives_next(action.peer, rank)
        return bool(self.wires[action.peer, rank])

    def receives_next(self, rank: int, sender: int) -> bool:
        """Whether a rank has come to a receive from the sender and has nothing from it to take first."""
        if self.position[rank] == len(self.programs[rank]) or self.wires[sender, rank]:
            return False
        head = self.head(rank)
        return head.kind in _SENDS.values() and head.peer == sender

    def act(self, rank: int) -> None:
        action = self.head(rank)
        self.position[rank] += 1
        kind, chunk, batch, chunks = action.kind, action.chunk, action.micro_batch, self.placement.chunks
        if action.peer is not None and kind in _SENDS:
            computed = {Kind.FORWARD} if kind is Kind.SEND_FORWARD else {Kind.BACKWARD, Kind.INPUT_BACKWARD}
            self.need(any((kind, chunk, batch) in self.done for kind in computed), action, "before it is computed")
            self.wires[rank, action.peer].append(action)
        elif action.peer is not None:
            sent = self.wires[action.peer, rank].popleft()
            step = 1 if kind is Kind.RECEIVE_FORWARD else -1
            fits = (_SENDS[sent.kind], sent.chunk + step, sent.micro_batch) == (kind, chunk, batch)
            self.need(fits, action, f"gets {sent}")
            self.there.add((kind is Kind.RECEIVE_BACKWARD, chunk, batch))
        else:
            self.compute(rank, action, chunks)

    def compute(self, rank: int, action: Action, chunks: int) -> None:
        kind, chunk, batch = action.kind, action.chunk, action.micro_batch
        self.need(self.placement.owner(chunk) == rank, action, "on the wrong rank")
        self.need((kind, chunk, batch) not in self.done, action, "twice")
        self.done.add((kind, chunk, batch))
        if kind is Kind.FORWARD:
            self.need(chunk == 0 or (False, chunk, batch) in self.there, action, "without its input")
            self.hand_over(rank, chunk + 1, batch, is_gradient=False)
        elif kind is Kind.WEIGHT_BACKWARD:
            self.need((Kind.INPUT_BACKWARD, chunk, batch) in self.done, action, "before its input's gradient")
        else:
            self.need((Kind.FORWARD, chunk, batch) in self.done, action, "before its forward pass")
            self.need(chunk == chunks - 1 or (True, chunk, batch) in self.there, action, "without its gradient")
            self.hand_over(rank, chunk - 1, batch, is_gradient=True)

    def hand_over(self, rank: int, chunk: int, batch: int, *, is_gradient: bool) -> None:
        """A neighbour on the same rank gets its input without a message."""
        if 0 <= chunk < self.placement.chunks and self.placement.owner(chunk) == rank:
            self.there.add((is_gradient, chunk, batch))

    def need(self, holds: bool, action: Action, what: str) -> None:
        if not holds:
            raise ProgramError(f"{action} {what}")
