"""The compute loop: receives commands, admits waiting sequences to the engine, steps it, delivers the tokens."""

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
    """The interface of a generation engine."""

    def add(self, request: Request) -> None: ...
    def cancel(self, request_id: str) -> None: ...
    def step(self) -> list[GeneratedToken]: ...


@dataclass(frozen=True)
class Add:
    """The command to generate the sequences of a request."""

    job: str
    sequences: tuple[Request, ...]


@dataclass(frozen=True)
class Cancel:
    """The command to cancel sequences of a request, waiting or running."""

    job: str
    sequence_ids: frozenset[str]


@dataclass(frozen=True)
class Stop:
    """The command to end the loop."""


@dataclass(frozen=True)
class RejectedSequence:
    """A sequence that the engine rejected, and the reason."""

    request_id: str
    reason: str


Command = Add | Cancel | Stop
Arrival = GeneratedToken | RejectedSequence


@dataclass
class Load:
    """The engine's load, for the metrics; written by the loop only.

    Attributes:
        step_seconds: time spent in all steps so far.
    """

    running: int = 0
    waiting: int = 0
    steps: int = 0
    step_seconds: float = 0.0


@dataclass
class EngineLoop:
    """Runs an engine until `Stop`.

    Args:
        commands: safe to put into from any thread, and from a signal handler.
        deliver: called with the tokens of each step on the loop's thread; must not block.
        max_running: most sequences in the engine at once; the others wait here, where canceling them costs nothing.
        check_idle: called every few seconds while the engine is idle; raises if the engine is lost.
    """

    commands: queue.SimpleQueue[Command]
    deliver: Callable[[Sequence[Arrival]], None]
    max_running: int
    check_idle: Callable[[], None] = field(default=lambda: None)
    load: Load = field(default_factory=Load)

    def __post_init__(self) -> None:
        self._queue = FairQueue()
        self._running: dict[str, str] = {}  # sequence id -> job

    def run(self, engine: StepEngine) -> None:
        """Steps the engine until `Stop`, then cancels what is running or waiting."""
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
        """Executes all queued commands, blocking for one if the engine is idle; returns False after `Stop`."""
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
        while self._queue and len(self._running) < self.max_running:
            job, request = self._queue.take()
            try:
                engine.add(request)
            except ConfigError as failure:
                refused.append(RejectedSequence(request.id, str(failure)))
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
    """Takes one sequence of each waiting request in turn, so that a large request does not hold up the others.

    Requests take turns in order of arrival, and the sequences of one keep their order.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, deque[Request]] = {}
        self._turns: deque[str] = deque()

    def __len__(self) -> int:
        return sum(len(sequences) for sequences in self._waiting.values())

    def add(self, request: str, sequences: Iterable[Request]) -> None:
        """Queues the sequences of a request."""
        if waiting := deque(sequences):
            self._waiting[request] = waiting
            self._turns.append(request)

    def take(self) -> tuple[str, Request]:
        """Removes the next sequence and returns it with its request; the queue must not be empty."""
        request = self._turns.popleft()
        sequences = self._waiting[request]
        sequence = sequences.popleft()
        if sequences:
            self._turns.append(request)
        else:
            del self._waiting[request]
        return request, sequence

    def remove(self, request: str, is_removed: Callable[[Request], bool]) -> None:
        """Removes the waiting sequences of a request for which `is_removed` is true."""
        waiting = self._waiting.get(request)
        if waiting is None:
            return
        kept = deque(sequence for sequence in waiting if not is_removed(sequence))
        if kept:
            self._waiting[request] = kept
        else:
            del self._waiting[request]
            self._turns.remove(request)
