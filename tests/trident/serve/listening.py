"""A server that listens on the loopback of this process, around a fake engine."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from urllib.parse import urlsplit

from megatron.inference.sampling import Sampling
from tests.trident.serve.fakes import FakeEngine
from trident.serve.access import Access, allowed_hosts
from trident.serve.network import listen
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.served_model import ServedModel
from trident.serve.server import EngineSession, Server
from trident.serve.service import STARTING
from trident.serve.single_turn import SingleTurn

_SECONDS = 120


@dataclass
class Listening:
    """A running server, its engine, and how its thread ended."""

    server: Server
    engine: FakeEngine
    thread: threading.Thread
    failures: list[BaseException]

    @property
    def port(self) -> int:
        """The address of its socket."""
        return int(urlsplit(self.server.address).port or 0)

    def connect(self) -> socket.socket:
        """A new connection."""
        return socket.create_connection(("127.0.0.1", self.port), _SECONDS)

    def send(self, raw: bytes) -> bytes:
        """Everything that the server sends until it closes the connection, for bytes that are sent at once."""
        with self.connect() as connection:
            connection.sendall(raw)
            return read_all(connection)

    def join(self) -> None:
        """Waits for the end."""
        self.thread.join(_SECONDS)
        assert not self.thread.is_alive()


@contextmanager
def listening(
    served: ServedModel,
    engine: FakeEngine | None = None,
    limits: ServerLimits | None = None,
    *,
    grace_seconds: float = 20.0,
    before: Callable[[], None] = lambda: None,
    waits: bool = True,
) -> Iterator[Listening]:
    """Runs a server for as long as the context is open.

    Args:
        before: what happens while the model is loaded.
        waits: until requests are taken.
    """
    engine = engine or FakeEngine()
    access = Access(hosts=allowed_hosts("127.0.0.1", ()))
    single_turn = SingleTurn(Sampling(), 60, has_seed=True)
    server = Server(listen("127.0.0.1", 0), limits or ServerLimits(), access, single_turn, grace_seconds)
    failures: list[BaseException] = []

    def open_model() -> EngineSession:
        before()
        return EngineSession(served, engine, engine.max_running)

    def run() -> None:
        try:
            server.run(open_model)
        except Exception as failure:
            failures.append(failure)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    found = Listening(server, engine, thread, failures)
    try:
        ends_at = time.monotonic() + _SECONDS
        while waits and server.service.state == STARTING and thread.is_alive() and time.monotonic() < ends_at:
            time.sleep(0.002)
        yield found
    finally:
        server.stop()
        server.stop()  # now
        found.join()


def read_all(connection: socket.socket) -> bytes:
    """Reads until the other side closes."""
    parts = []
    try:
        while part := connection.recv(65536):
            parts.append(part)
    except ConnectionResetError:
        pass
    return b"".join(parts)


def post(values: object, path: str = "/v1/completions", *, closes: bool = True) -> bytes:
    """The bytes of a request with a JSON body."""
    body = values if isinstance(values, bytes) else json.dumps(values).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n" + ("Connection: close\r\n" if closes else "")
    return head.encode() + b"\r\n" + body


def get(path: str) -> bytes:
    """The bytes of a request without a body."""
    return f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode()
