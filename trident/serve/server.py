"""The server: the web in one thread, the engine in the main thread, and graceful shutdown."""

from __future__ import annotations

import asyncio
import queue
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

from megatron import log
from trident.serve.access import Access
from trident.serve.execution.engine_loop import Arrival, Command, EngineLoop, Load, StepEngine, Stop
from trident.serve.execution.jobs import Jobs
from trident.serve.metrics import ServerMetrics
from trident.serve.network import WebThread, address_of
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import broken, stopping
from trident.serve.requests.served_model import ServedModel
from trident.serve.service import STARTING, Service
from trident.serve.single_turn import SingleTurn
from trident.serve.web import build_app

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class EngineSession:
    """A loaded model and its engine.

    Args:
        max_running: see `EngineLoop`.
        check_idle: see `EngineLoop`.
        close: called when the engine is no longer needed.
    """

    served: ServedModel
    engine: StepEngine
    max_running: int
    check_idle: Callable[[], None] = field(default=lambda: None)
    close: Callable[[], None] = field(default=lambda: None)


class _StoppedEarly(Exception):
    """A stop signal arrived while the checkpoint was being loaded."""


class Server:
    """Serves one model.

    Args:
        listener: closed at the end.
        grace_seconds: time that requests in progress have to finish after a stop.
    """

    def __init__(
        self,
        listener: socket.socket,
        limits: ServerLimits,
        access: Access,
        single_turn: SingleTurn,
        grace_seconds: float,
    ) -> None:
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._load = Load()
        jobs = Jobs(self._commands, limits)
        metrics = ServerMetrics(self._load, lambda: jobs.sequences)
        self.service = Service(limits, jobs, metrics, single_turn)
        self.address = address_of(listener)
        self._web = WebThread(build_app(self.service, access), listener, limits)
        self._grace_seconds = grace_seconds
        self._stops = 0
        self._winding_down: asyncio.Task[None] | None = None

    def run(self, open_model: Callable[[], EngineSession]) -> None:
        """Answers `/health` at once and requests once the model is open; returns after SIGTERM or SIGINT.

        Running requests have the grace period to finish after the first signal; a second one ends them at once.

        Args:
            open_model: called on this thread, which also steps the engine.
        """
        with self._signals():
            self._web.start()
            try:
                self._compute(open_model())
            except _StoppedEarly:
                log.info("stopped while the checkpoint was being loaded")
            except Exception:
                self._web.call(self.service.end, broken())
                raise
            finally:
                self._web.stop()

    def stop(self) -> None:
        """Stops the server as a signal does; safe from any thread."""
        self._stops += 1
        self._web.call(self._wind_down)

    def _compute(self, session: EngineSession) -> None:
        def deliver(arrivals: Sequence[Arrival]) -> None:
            self._web.call(self.service.jobs.arrive, arrivals)

        self._web.call(self.service.open, session.served)
        log.line(f"serving {session.served.name} at {self.address}")
        loop = EngineLoop(self._commands, deliver, session.max_running, session.check_idle, self._load)
        try:
            loop.run(session.engine)
        finally:
            session.close()

    def _wind_down(self) -> None:
        """Takes no more requests, and stops the engine once the running ones have ended; runs on the web thread."""
        self.service.drain()
        if self._winding_down is None:
            self._winding_down = asyncio.get_running_loop().create_task(self._end_when_idle())

    async def _end_when_idle(self) -> None:
        jobs = self.service.jobs
        ends_at = time.monotonic() + self._grace_seconds
        log.info(_shutdown_message(len(jobs), self._grace_seconds))
        while len(jobs) and time.monotonic() < ends_at and self._stops < 2:
            await asyncio.sleep(_POLL_SECONDS)
        self.service.end(stopping())
        self._commands.put(Stop())

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Stops the server at a signal; leaves signals alone outside the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, action in previous.items():
                signal.signal(number, action)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_early = self.service.state == STARTING
        self.stop()
        if is_early:
            raise _StoppedEarly


def _shutdown_message(requests: int, grace_seconds: float) -> str:
    if not requests:
        return "stopping: no requests in progress"
    counted = "1 request" if requests == 1 else f"{requests} requests"
    return f"stopping: {counted} in progress, at most {grace_seconds:g} s left"
