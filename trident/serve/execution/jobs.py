"""The requests in progress, as the event loop sees them; used on the loop's thread only."""

from __future__ import annotations

import asyncio
import contextlib
import queue
from collections.abc import AsyncIterator, Iterator, Sequence

from megatron.inference.generation import GeneratedToken, Request
from trident.serve.execution.engine_loop import Add, Arrival, Cancel, Command
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import Refusal, broken, busy, invalid, too_slow


class GenerationJob:
    """The sequences of one request, and the tokens that have arrived for them."""

    def __init__(self, name: str, requests: Sequence[Request], commands: queue.SimpleQueue[Command]) -> None:
        self.name = name
        self._ids = [request.id for request in requests]
        self._indices = {identity: index for index, identity in enumerate(self._ids)}
        self._unfinished = {request.id: None for request in requests}
        self._commands = commands
        self._arrivals: asyncio.Queue[Arrival | Refusal] = asyncio.Queue()

    async def tokens(self) -> AsyncIterator[tuple[int, GeneratedToken]]:
        """Yields every token with the index of its sequence in the request, until all sequences have ended.

        Raises:
            Refusal: the engine rejected a sequence or failed, the time limit is over, or the server stops.
        """
        while self._unfinished:
            arrival = await self._arrivals.get()
            if isinstance(arrival, Refusal):
                raise arrival
            if not isinstance(arrival, GeneratedToken):
                raise invalid(arrival.reason)
            if arrival.request_id in self._unfinished:
                if arrival.failure is not None:
                    raise broken()
                if arrival.finish is not None:
                    del self._unfinished[arrival.request_id]
                yield self._indices[arrival.request_id], arrival

    def arrive(self, arrival: Arrival | Refusal) -> None:
        """Delivers an arrival for one of the sequences, or a refusal that ends all of them."""
        self._arrivals.put_nowait(arrival)

    def end(self, index: int) -> None:
        """Cancels the rest of a sequence whose text is complete."""
        identity = self._ids[index]
        if identity in self._unfinished:
            del self._unfinished[identity]
            self._commands.put(Cancel(self.name, frozenset([identity])))

    def close(self) -> None:
        if self._unfinished:
            self._commands.put(Cancel(self.name, frozenset(self._unfinished)))
            self._unfinished = {}


class Jobs:
    """All waiting and running requests, within the limits on sequences.

    Args:
        commands: the queue of commands to the engine's loop.
    """

    def __init__(self, commands: queue.SimpleQueue[Command], limits: ServerLimits) -> None:
        self._commands = commands
        self._limits = limits
        self._jobs: dict[str, GenerationJob] = {}
        self._refusal: Refusal | None = None
        self.sequences = 0

    def __len__(self) -> int:
        return len(self._jobs)

    @contextlib.contextmanager
    def open(self, name: str, requests: Sequence[Request]) -> Iterator[GenerationJob]:
        """Submits sequences, whose ids begin with `name/`; closing the context cancels what is not finished.

        Raises:
            Refusal: the queue is full, or the server is stopping.
        """
        if self._refusal is not None:
            raise self._refusal
        limit = self._limits.queued_sequences
        if self.sequences + len(requests) > limit:
            raise busy(f"{self.sequences} answers are running or waiting, and the server takes at most {limit}.")
        job = self._jobs[name] = GenerationJob(name, requests, self._commands)
        self.sequences += len(requests)
        seconds = self._limits.request_seconds
        timer = asyncio.get_running_loop().call_later(seconds, lambda: job.arrive(too_slow(seconds)))
        self._commands.put(Add(name, tuple(requests)))
        try:
            yield job
        finally:
            timer.cancel()
            job.close()
            self.sequences -= len(requests)
            del self._jobs[name]

    def arrive(self, arrivals: Sequence[Arrival]) -> None:
        """Distributes the arrivals of one step; closed jobs' arrivals are ignored."""
        for arrival in arrivals:
            job = self._jobs.get(arrival.request_id.rpartition("/")[0])
            if job is not None:
                job.arrive(arrival)

    def refuse_new(self, refusal: Refusal) -> None:
        self._refusal = refusal

    def end_all(self, refusal: Refusal) -> None:
        """Ends all requests in progress with a refusal, and takes no more."""
        self._refusal = refusal
        for job in self._jobs.values():
            job.arrive(refusal)
