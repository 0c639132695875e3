"""An engine that spans several ranks, driven by rank 0.

Before each step rank 0 broadcasts new requests and cancellations as JSON; every rank applies them to its engine, and
all engines make the same step. Waiting ranks block in the broadcast without using processor time. Rank 0 sends a
heartbeat every few seconds, so that no rank runs into a timeout and a lost rank is detected soon.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from megatron.errors import ConfigError, PeerLostError
from megatron.inference.generation.generation_engine import GenerationEngine
from megatron.inference.generation.request import GeneratedToken, Request
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import broadcast_json, is_lost_peer

HEARTBEAT_SECONDS = 5.0


def drive(engine: GenerationEngine) -> Driver:
    """Returns rank 0's handle on the engine; all other ranks call `serve_as_worker`.

    Raises:
        ConfigError: not called on rank 0, or several model copies.
    """
    _check_one_copy(engine)
    if engine.loaded.mesh.world.rank != 0:
        raise ConfigError(f"Rank {engine.loaded.mesh.world.rank} cannot drive the engine. Rank 0 must.")
    return Driver(engine)


def serve_as_worker(engine: GenerationEngine) -> None:
    """Executes rank 0's commands until it closes its `Driver`.

    Raises:
        PeerLostError: another rank ended.
        ConfigError: several model copies.
    """
    _check_one_copy(engine)
    while True:
        message = _exchange(None, engine.loaded.mesh.background)
        if message["is_over"]:
            return
        if message["is_step"]:
            _apply(message, engine)
            _step(engine)


class Driver:
    """Rank 0's handle on the engine; closing it releases the other ranks. Thread-safe."""

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._axis = engine.loaded.mesh.background
        self._lock = threading.Lock()
        self._added: list[Request] = []
        self._cancelled: list[str] = []
        self._sent_at = time.monotonic()
        self._failure: PeerLostError | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if self._axis.size > 1:
            self._thread = threading.Thread(target=self._send_heartbeats, name="generation driver", daemon=True)
            self._thread.start()

    def __enter__(self) -> Driver:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def add(self, request: Request) -> None:
        """Adds a request from the next step on.

        Raises:
            ConfigError: the request can never be served, or its id is in use.
        """
        with self._lock:
            self._engine.check(request)
            if any(request.id == other.id for other in self._added):
                raise ConfigError(f"Request {request.id} is being served already. Use another id.")
            self._added.append(request)

    def cancel(self, request_id: str) -> None:
        """Cancels a request; the next step reports it. No effect on a request that has ended."""
        with self._lock:
            self._cancelled.append(request_id)

    def step(self) -> list[GeneratedToken]:
        """Runs one step on all ranks; returns the new tokens.

        Raises:
            PeerLostError: another rank ended.
            NumericsError: the network computed a value that is not finite.
        """
        with self._lock:
            message = {
                "is_over": False,
                "is_step": True,
                "add": [request.to_json() for request in self._added],
                "cancel": self._cancelled,
            }
            self._added, self._cancelled = [], []
            self._send(message)
            _apply(message, self._engine)
            return _step(self._engine)

    def check_ranks(self) -> None:
        """Checks between steps that no rank is known to be lost.

        Raises:
            PeerLostError: another rank ended.
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Releases the other ranks from `serve_as_worker`."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        with self._lock:
            if self._failure is None:
                self._send({"is_over": True})
        if self._thread is not None:
            self._thread.join()

    def _send(self, message: dict[str, Any]) -> None:
        self.check_ranks()
        if self._axis.size == 1:
            return
        try:
            _exchange(message, self._axis)
        except PeerLostError as failure:
            self._failure = failure
            raise
        self._sent_at = time.monotonic()

    def _send_heartbeats(self) -> None:
        """Sends an empty message whenever nothing else was sent for a while."""
        while not self._is_over.wait(HEARTBEAT_SECONDS / 2):
            with self._lock:
                is_due = time.monotonic() - self._sent_at >= HEARTBEAT_SECONDS / 2
                if is_due and not self._is_over.is_set() and self._failure is None:
                    try:
                        self._send({"is_over": False, "is_step": False})
                    except PeerLostError:
                        return  # the next call raises it


def _check_one_copy(engine: GenerationEngine) -> None:
    mesh = engine.loaded.mesh
    if mesh.batch.size > 1:
        raise ConfigError(
            f"{mesh.world.size} ranks hold {mesh.batch.size} copies of the model, and an engine has one. Start "
            f"{mesh.model.size} ranks, or split the model over all of them."
        )


def _apply(message: dict[str, Any], engine: GenerationEngine) -> None:
    for values in message["add"]:
        engine.add(Request.of_json(values))
    for request_id in message["cancel"]:
        engine.cancel(request_id)


def _step(engine: GenerationEngine) -> list[GeneratedToken]:
    with _naming_lost_ranks():
        return engine.step()


def _exchange(message: dict[str, Any] | None, axis: Axis) -> dict[str, Any]:
    with _naming_lost_ranks():
        return dict(broadcast_json(message, axis))


@contextlib.contextmanager
def _naming_lost_ranks() -> Iterator[None]:
    """Turns the communication errors caused by a lost rank into `PeerLostError`."""
    try:
        yield
    except RuntimeError as failure:
        if not is_lost_peer(failure):
            raise
        raise PeerLostError(f"A rank of the generation engine ended: {str(failure).splitlines()[0]}") from failure
