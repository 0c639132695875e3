"""One rank decides, the others follow: an engine that is spread over ranks, used from rank 0 alone.

Before each step rank 0 sends the requests that have come and the cancellations as JSON; every rank applies them to its
own engine, and all engines make the same step. Ranks that wait for a command sleep in the network; rank 0 sends
something at least every few seconds, so that no rank waits until a timeout and each learns soon that another is gone.
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

SIGN_OF_LIFE_SECONDS = 5.0


def lead(engine: GenerationEngine) -> Leader:
    """The engine for the use of rank 0, while all other ranks are in `follow`.

    Raises:
        ConfigError: this is not rank 0, or there is more than one model copy.
    """
    _check_one_copy(engine)
    if engine.loaded.mesh.world.rank != 0:
        raise ConfigError(f"Rank {engine.loaded.mesh.world.rank} cannot lead. Rank 0 leads and all others follow.")
    return Leader(engine)


def follow(engine: GenerationEngine) -> None:
    """Executes rank 0's commands until it closes its `Leader`.

    Raises:
        PeerLostError: another rank ended.
        ConfigError: there is more than one model copy.
    """
    _check_one_copy(engine)
    while True:
        message = _exchange(None, engine.loaded.mesh.background)
        if message["is_over"]:
            return
        if message["is_step"]:
            _apply(message, engine)
            _step(engine)


class Leader:
    """Rank 0's handle on the engine; `close` it, or leave its `with` block, to release the other ranks.

    Its methods may be called from several threads.
    """

    def __init__(self, engine: GenerationEngine) -> None:
        self._engine = engine
        self._axis = engine.loaded.mesh.background
        self._lock = threading.Lock()
        self._added: list[Request] = []
        self._cancelled: list[str] = []
        self._spoke_at = time.monotonic()
        self._failure: PeerLostError | None = None
        self._is_over = threading.Event()
        self._thread: threading.Thread | None = None
        if self._axis.size > 1:
            self._thread = threading.Thread(target=self._show_life, name="generation leader", daemon=True)
            self._thread.start()

    def __enter__(self) -> Leader:
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def add(self, request: Request) -> None:
        """Takes a request for the next step.

        Raises:
            ConfigError: it can never be served, or its id is in use.
        """
        with self._lock:
            self._engine.check(request)
            if any(request.id == other.id for other in self._added):
                raise ConfigError(f"Request {request.id} is being served already. Use another id.")
            self._added.append(request)

    def cancel(self, request_id: str) -> None:
        """Ends a request, which the next step reports as cancelled; does nothing if it has ended already."""
        with self._lock:
            self._cancelled.append(request_id)

    def step(self) -> list[GeneratedToken]:
        """Computes one step on all ranks; returns the new tokens.

        Raises:
            PeerLostError: another rank ended.
            NumericsError: the network computes something that is not a number.
        """
        with self._lock:
            message = {
                "is_over": False,
                "is_step": True,
                "add": [request.to_json() for request in self._added],
                "cancel": self._cancelled,
            }
            self._added, self._cancelled = [], []
            self._speak(message)
            _apply(message, self._engine)
            return _step(self._engine)

    def check_ranks(self) -> None:
        """Checks that no rank is known to have ended; for the time between steps.

        Raises:
            PeerLostError: one has.
        """
        if self._failure is not None:
            raise self._failure

    def close(self) -> None:
        """Releases the other ranks from `follow`."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        with self._lock:
            if self._failure is None:
                self._speak({"is_over": True})
        if self._thread is not None:
            self._thread.join()

    def _speak(self, message: dict[str, Any]) -> None:
        self.check_ranks()
        if self._axis.size == 1:
            return
        try:
            _exchange(message, self._axis)
        except PeerLostError as failure:
            self._failure = failure
            raise
        self._spoke_at = time.monotonic()

    def _show_life(self) -> None:
        """Sends something when nothing was sent for a while."""
        while not self._is_over.wait(SIGN_OF_LIFE_SECONDS / 2):
            with self._lock:
                is_silent = time.monotonic() - self._spoke_at >= SIGN_OF_LIFE_SECONDS / 2
                if is_silent and not self._is_over.is_set() and self._failure is None:
                    try:
                        self._speak({"is_over": False, "is_step": False})
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
    """Turns communication errors that a rank caused by ending into one that says so."""
    try:
        yield
    except RuntimeError as failure:
        if not is_lost_peer(failure):
            raise
        raise PeerLostError(f"A rank of the generation engine ended: {str(failure).splitlines()[0]}") from failure
