"""The loop that computes: takes commands, gives waiting sequences to the engine, steps it, hands out the tokens."""

from __future__ import annotations

import contextlib
import queue
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from megatron import log
from megatron.errors import ConfigError
from megatron.inference.generation import GeneratedToken, Request

_IDLE_CHECK_SECONDS = 5.0


class StepEngine(Protocol):
    """What is asked of a generation engine."""

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[GeneratedToken]: ...


@dataclass(frozen=True)
class Add:
    """The command to compute the sequences of a request."""

    job: str
    sequences: tuple[Request, ...]


@dataclass(frozen=True)
class Cancel:
    """The command to drop sequences of a request, wherever they are."""

    job: str
    sequence_ids: frozenset[str]


@dataclass(frozen=True)
class Stop:
    """The command to end the loop."""


@dataclass(frozen=True)
class Refused:
    """A sequence that the engine did not take, and why."""

    request_id: str
    reason: str


Command = Add | Cancel | Stop
Arrival = GeneratedToken | Refused


@dataclass
class Load:
    """What the engine is doing, for the metrics; written by the loop, read by anyone.

    Attributes:
        step_seconds: computing time of all steps so far.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    step_seconds: float = 0.0


@dataclass
class EngineLoop:
    """Runs an engine for as long as there are commands.

    Args:
        commands: safe to put into from any thread, and from a signal handler.
        deliver: is given the tokens of each step, on the thread of the loop; must not wait.
        most_running: sequences that are in the engine at the same time; the others wait here, where they can be dropped
            for nothing.
        check_idle: called every few seconds while there is nothing to compute; raises if the engine is lost.
    """

    commands: queue.SimpleQueue[Command]
    deliver: Callable[[Sequence[Arrival]], None]
    most_running: int
    check_idle: Callable[[], None] = field(default=lambda: None)
    load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        self._queue = FairQueue()
        self._running: dict[str, str] = {}  # job of each sequence

    def run(self, engine: StepEngine) -> None:
        """Steps the engine until `Stop` is taken; what is in the engine or waits then is dropped."""
        while self._take_commands(engine):
            self._admit(engine)
            if self._running:
                self._step(engine)
            else:
                self.check_idle()
            self.load.running, self.load.waiting = len(self._running), len(self._queue)
        for sequence in list(self._running):
            engine.cancel(sequence)

    def _take_commands(self, engine: StepEngine) -> bool:
        """Carries out all commands there are; waits for one if there is nothing to compute. False after `Stop`."""
        waits = not self._running and not self._queue
        with contextlib.suppress(queue.Empty):
            while True:
                command = self.commands.get(waits, _IDLE_CHECK_SECONDS)
                waits = False
                if isinstance(command, Stop):
                    return False
                if isinstance(command, Add):
                    self._queue.add(command.job, command.sequences)
                else:
                    self._cancel(engine, command)
        return True

    def _cancel(self, engine: StepEngine, command: Cancel) -> None:
        for sequence in command.sequence_ids & self._running.keys():
            engine.cancel(sequence)
            del self._running[sequence]
        self._queue.remove(command.job, lambda request: request.id in command.sequence_ids)

    def _admit(self, engine: StepEngine) -> None:
        refused: list[Arrival] = []
        while self._queue and len(self._running) < self.most_running:
            job, request = self._queue.take()
            try:
                engine.add(request)
            except ConfigError as failure:
                refused.append(Refused(request.id, str(failure)))
            else:
                self._running[request.id] = job
        if refused:
            self.deliver(refused)

    def _step(self, engine: StepEngine) -> None:
        started_at = time.perf_counter()
        tokens = [token for token in engine.step() if token.request_id in self._running]
        self.load.steps += 1
        self.load.step_seconds += time.perf_counter() - started_at
        for token in tokens:
            if token.finish is not None:
                del self._running[token.request_id]
            if token.failure is not None:
                log.error(f"a token of {token.request_id} could not be chosen:\n{token.failure}")
        if tokens:
            self.deliver(tokens)


class FairQueue:
    """Gives one sequence of each waiting request in turn, so that a request for many does not hold up the others.

    Requests take turns in the order in which they arrived, and the sequences of one keep their order.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Request]] = {}
        self._turns: deque[str] = deque()

    def __len__(self) -> int:
        return sum(len(items) for items in self._waiting.values())

    def add(self, request: str, items: Iterable[Request]) -> None:
        """Queues the sequences of a request."""
        sequences = deque(items)
        if sequences:
            self._waiting[request] = sequences
            self._turns.append(request)

    def take(self) -> tuple[str, Request]:
        """Removes the sequence whose turn it is, and says whose it is; the queue must not be empty."""
        request = self._turns.popleft()
        items = self._waiting[request]
        item = items.popleft()
        if items:
            self._turns.append(request)
        else:
            del self._waiting[request]
        return request, item

    def remove(self, request: str, is_gone: Callable[[Request], bool]) -> None:
        """Removes the waiting sequences of a request for which `is_gone` is true."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return
        kept = deque(item for item in waiting if not is_gone(item))
        if kept:
            self._waiting[request] = kept
        else:
            del self._waiting[request]
            self._turns.remove(request)
