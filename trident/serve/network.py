"""Sockets and connections: uvicorn in its own thread, with added protection against slow and excess clients.

The only file that imports uvicorn.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from megatron.errors import ConfigError
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import Refusal, busy

if TYPE_CHECKING:
    from starlette.types import ASGIApp

_BACKLOG = 1024
_START_SECONDS = 30.0
_CLOSE_SECONDS = 2.0


def listen(host: str, port: int) -> socket.socket:
    """Opens the listening socket; port 0 takes a free port.

    Raises:
        ConfigError: the address is not this machine's, or the port is taken.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as failure:
        raise ConfigError(
            f"--host {host} --port {port} cannot be opened: {failure.strerror or failure}. Choose another port, or an "
            "address of this machine."
        ) from failure


def address_of(listener: socket.socket) -> str:
    """The URL of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


class WebThread:
    """Serves an application on a socket until it is stopped.

    Args:
        listener: closed when the thread ends.

    Raises:
        ConfigError: uvicorn is not installed.
    """

    def __init__(self, app: ASGIApp, listener: socket.socket, limits: ServerLimits) -> None:
        try:
            import uvicorn
        except ImportError as failure:
            raise ConfigError("serving needs the uvicorn package (pip install trident-megatron[serve]).") from failure
        # asyncio would log a line for each event that is sent between a client's disconnect and its detection.
        logging.getLogger("asyncio").setLevel(logging.ERROR)
        config = uvicorn.Config(
            app,
            loop="asyncio",
            http=_guarded_protocol(limits),
            ws="none",
            lifespan="off",
            log_config=None,
            log_level="critical",  # the application logs its own failures
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=limits.header_bytes,
            timeout_keep_alive=int(limits.idle_seconds),
            timeout_graceful_shutdown=int(_CLOSE_SECONDS),
        )
        self._server = uvicorn.Server(config)
        self._listener = listener
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_ready = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="web", daemon=True)

    def start(self) -> None:
        """Starts the thread; returns when connections are accepted."""
        self._thread.start()
        self._is_ready.wait(_START_SECONDS)
        if self._failure is not None:
            raise self._failure

    def call(self, function: Callable[..., Any], *values: Any) -> None:
        """Schedules a call on the thread; safe from any thread and from a signal handler."""
        loop = self._loop
        if loop is not None and not loop.is_closed():
            try:
                loop.call_soon_threadsafe(function, *values)
            except RuntimeError:  # the loop was closed in the meantime
                return

    def stop(self) -> None:
        """Ends the thread; open connections have a moment to finish sending."""
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(_START_SECONDS)
        self._listener.close()

    def _run(self) -> None:
        try:
            asyncio.run(self._serve())
        except BaseException as failure:
            self._failure = failure
        finally:
            self._is_ready.set()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.call_soon(self._is_ready.set)  # the socket is already listening
        await self._server.serve(sockets=[self._listener])


def _guarded_protocol(limits: ServerLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with bounds on each connection and on their number."""
    from uvicorn.protocols.http.h11_impl import H11Protocol

    class GuardedProtocol(H11Protocol):
        """Closes connections beyond the limit, without a request for too long, or whose client does not read."""

        _header_timer: asyncio.TimerHandle | None = None
        _stall_timer: asyncio.TimerHandle | None = None

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > limits.connections:
                transport.write(_whole_response(busy(f"The limit of {limits.connections} connections is reached.")))
                transport.close()
            else:
                self._expect_request()

        def connection_lost(self, exc: Exception | None) -> None:
            _cancel(self._header_timer, self._stall_timer)
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if not self.transport.is_closing():
                super().data_received(data)

        def handle_events(self) -> None:
            before = self.cycle
            super().handle_events()
            if self.cycle is not before:
                _cancel(self._header_timer)

        def on_response_complete(self) -> None:
            self._expect_request()
            super().on_response_complete()

        def send_400_response(self, msg: str) -> None:
            text = f"The request is not valid HTTP, or its headers exceed {limits.header_bytes} bytes."
            if "Host:" in str(sys.exc_info()[1]):  # the failure of h11 that uvicorn is handling
                text = "An HTTP/1.1 request must have exactly one Host header."
            self.transport.write(_whole_response(Refusal(400, text, code="bad_http")))
            self.transport.close()

        def pause_writing(self) -> None:
            super().pause_writing()
            _cancel(self._stall_timer)
            self._stall_timer = self.loop.call_later(limits.stall_seconds, self.transport.abort)

        def resume_writing(self) -> None:
            _cancel(self._stall_timer)
            super().resume_writing()

        def _expect_request(self) -> None:
            _cancel(self._header_timer)
            seconds = max(limits.header_seconds, limits.idle_seconds)
            self._header_timer = self.loop.call_later(seconds, self.transport.abort)

    return GuardedProtocol


def _cancel(*timers: asyncio.TimerHandle | None) -> None:
    for timer in timers:
        if timer is not None:
            timer.cancel()


def _whole_response(refusal: Refusal) -> bytes:
    """A refusal as raw HTTP, for a connection without a request."""
    body = json.dumps(refusal.to_json()).encode()
    reason = {400: "Bad Request", 503: "Service Unavailable"}[refusal.status]
    headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), "Connection": "close"}
    lines = [f"HTTP/1.1 {refusal.status} {reason}", *(f"{name}: {value}" for name, value in headers.items())]
    return "\r\n".join([*lines, "", ""]).encode() + body
