"""Requests that are being computed, as the event loop sees them. Everything here belongs to the loop's thread."""

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
    """The sequences of one request, and what has arrived for them."""

    def __init__(self, name: str, requests: Sequence[Request], commands: queue.SimpleQueue[Command]) -> None:
        self.name = name
        self._ids = [request.id for request in requests]
        self._places = {identity: place for place, identity in enumerate(self._ids)}
        self._unfinished = {request.id: None for request in requests}
        self._commands = commands
        self._arrivals: asyncio.Queue[Arrival | Refusal] = asyncio.Queue()

    async def tokens(self) -> AsyncIterator[tuple[int, GeneratedToken]]:
        """Every token with the place of its sequence among the request's, until all sequences have ended.

        Raises:
            Refusal: the engine did not take a sequence or failed at it, the time is over, or the server stops.
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
                yield self._places[arrival.request_id], arrival

    def arrive(self, arrival: Arrival | Refusal) -> None:
        """Hands over what has arrived for one of the sequences, or a reason to end all of them."""
        self._arrivals.put_nowait(arrival)

    def end(self, place: int) -> None:
        """Asks for no more tokens of a sequence: its text is complete."""
        identity = self._ids[place]
        if identity in self._unfinished:
            del self._unfinished[identity]
            self._commands.put(Cancel(self.name, frozenset([identity])))

    def close(self) -> None:
        if self._unfinished:
            self._commands.put(Cancel(self.name, frozenset(self._unfinished)))
            self._unfinished = {}


class Jobs:
    """All requests that wait or are computed, within the limits on sequences.

    Args:
        commands: what the engine's loop takes its commands from.
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
    def opened(self, name: str, requests: Sequence[Request]) -> Iterator[GenerationJob]:
        """Has sequences computed for as long as the context is open; their ids begin with `name/`.

        Raises:
            Refusal: too much is waiting, or the server is stopping.
        """
        if self._refusal is not None:
            raise self._refusal
        most = self._limits.queued_sequences
        if self.sequences + len(requests) > most:
            raise busy(f"{self.sequences} answers are being computed or wait, and the server takes at most {most}.")
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
        """Distributes what the engine's loop delivered; what nobody waits for any more is dropped."""
        for arrival in arrivals:
            job = self._jobs.get(arrival.request_id.rpartition("/")[0])
            if job is not None:
                job.arrive(arrival)

    def refuse_new(self, refusal: Refusal) -> None:
        self._refusal = refusal

    def end_all(self, refusal: Refusal) -> None:
        """Ends the requests that are being computed, for this reason, and takes no more."""
        self._refusal = refusal
        for job in self._jobs.values():
            job.arrive(refusal)
