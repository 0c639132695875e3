"""A whole server: the web in one thread, the engine in the main one, and an orderly end."""

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
from trident.serve.requests.served import Served
from trident.serve.service import STARTING, Service
from trident.serve.single_turn import SingleTurn
from trident.serve.web import build_app

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Opened:
    """A model that is ready to be served.

    Args:
        most_running: sequences that the engine computes at the same time.
        check_idle: see `EngineLoop`.
        close: called when the engine is needed no more.
    """

    served: Served
    engine: StepEngine
    most_running: int
    check_idle: Callable[[], None] = field(default=lambda: None)
    close: Callable[[], None] = field(default=lambda: None)


class _StoppedEarly(Exception):
    """A stop signal arrived while the checkpoint was loaded."""


class Server:
    """Serves one model.

    Args:
        listener: is closed at the end.
        grace_seconds: for requests in progress when the server is stopped.
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

    def run(self, open_model: Callable[[], Opened]) -> None:
        """Answers `/health` at once, requests when the model is open, and returns after SIGTERM or SIGINT.

        Those signals let running requests end for the grace period; a second one ends them now.

        Args:
            open_model: called on this thread, which is also the one that steps the engine.
        """
        with self._signals():
            self._web.start()
            try:
                self._compute(open_model())
            except _StoppedEarly:
                log.info("stopped while the checkpoint was loaded")
            except Exception:
                self._web.call(self.service.end, broken())
                raise
            finally:
                self._web.stop()

    def stop(self) -> None:
        """Does what a stop signal does; from any thread."""
        self._stops += 1
        self._web.call(self._wind_down)

    def _compute(self, opened: Opened) -> None:
        def deliver(arrivals: Sequence[Arrival]) -> None:
            self._web.call(self.service.jobs.arrive, arrivals)

        self._web.call(self.service.open, opened.served)
        log.line(f"serving {opened.served.name} at {self.address}")
        loop = EngineLoop(self._commands, deliver, opened.most_running, opened.check_idle, self._load)
        try:
            loop.run(opened.engine)
        finally:
            opened.close()

    def _wind_down(self) -> None:
        """On the web's thread: takes no more requests, and stops the engine when the running ones have ended."""
        self.service.drain()
        if self._winding_down is None:
            self._winding_down = asyncio.get_running_loop().create_task(self._end_when_idle())

    async def _end_when_idle(self) -> None:
        jobs = self.service.jobs
        ends_at = time.monotonic() + self._grace_seconds
        log.info(_farewell(len(jobs), self._grace_seconds))
        while len(jobs) and time.monotonic() < ends_at and self._stops < 2:
            await asyncio.sleep(_POLL_SECONDS)
        self.service.end(stopping())
        self._commands.put(Stop())

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Stops at a signal; in a thread other than the main one, signals are left alone."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._on_signal) for number in _SIGNALS}
        try:
            yield
        finally:
            for number, action in former.items():
                signal.signal(number, action)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        is_early = self.service.state == STARTING
        self.stop()
        if is_early:
            raise _StoppedEarly


def _farewell(requests: int, grace_seconds: float) -> str:
    if not requests:
        return "stopping: no request is being answered"
    counted = "1 request is" if requests == 1 else f"{requests} requests are"
    return f"stopping: {counted} being answered, with at most {grace_seconds:g} s left"
