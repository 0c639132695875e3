"""The endpoints as a web application: reading bodies within limits, checking access, sending replies.

The only file that imports starlette.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import hashlib
import re
import traceback
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from megatron import log
from megatron.errors import ConfigError, printable
from trident.serve.access import Access
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.refusals import Refusal, broken, invalid
from trident.serve.service import Reply, Service

if TYPE_CHECKING:
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp

Act = Callable[["Request"], Awaitable[Reply]]

_CLOSE = {"Connection": "close"}
_NO_SNIFFING = {"X-Content-Type-Options": "nosniff"}
_DRAINED_BYTES = 16 << 20
_DRAINED_SECONDS = 1.0
_CLIENT_DISCONNECTED = 499  # nginx's number; it is only counted, never sent
_FILE = Path(__file__).with_name("page.html")


class _ClientDisconnected(Exception):
    """The client closed the connection before it received the answer."""


def build_app(service: Service, access: Access) -> ASGIApp:
    """The application of one server.

    Raises:
        ConfigError: starlette is not installed.
    """
    try:
        from starlette.applications import Starlette
        from starlette.middleware import Middleware
        from starlette.middleware.cors import CORSMiddleware
        from starlette.routing import Route
    except ImportError as failure:
        raise ConfigError("serving needs the starlette package (pip install trident-megatron[serve]).") from failure
    limits, page = service.limits, read_page()

    async def unknown(request: Request, failure: Exception) -> Response:
        return _refused(_routing_refusal(request, failure))

    sends = _Sender(service, access)

    def route(path: str, name: str, act: Act, method: str = "GET") -> Route:
        return Route(path, sends.reply_of(name, act), methods=[method])

    routes = [
        route("/v1/completions", "completions", lambda request: _of_body(service.completions, request, limits), "POST"),
        route("/v1/chat/completions", "chat", lambda request: _of_body(service.chat, request, limits), "POST"),
        route("/v1/models", "models", lambda request: _at_once(service.models)),
        route("/v1/models/{name:path}", "models", lambda request: _at_once(service.one_model, **request.path_params)),
        route("/generate", "generate", lambda request: service.generate(_query(request))),
        route("/health", "health", lambda request: _at_once(service.health)),
        Route("/metrics", sends.page_of(lambda request: _metrics_page(service, request))),
        Route("/", sends.page_of(lambda request: page)),
    ]
    allowed = ["Authorization", "Content-Type"]
    cors = Middleware(
        CORSMiddleware, allow_origins=access.origins, allow_methods=["GET", "POST"], allow_headers=allowed
    )
    app = Starlette(
        routes=routes, middleware=[cors] if access.origins else [], exception_handlers={404: unknown, 405: unknown}
    )
    app.router.redirect_slashes = False  # no redirect depends on the host in a request
    return app


class _Sender:
    """Turns the service's replies and refusals into responses, and counts them."""

    def __init__(self, service: Service, access: Access) -> None:
        self._service = service
        self._access = access

    def reply_of(self, name: str, act: Act) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that checks access, acts while the client is connected, and sends the reply."""

        async def respond(request: Request) -> Response:
            return await self._respond(name, act, request)

        return respond

    def page_of(self, find: Callable[[Request], Page]) -> Callable[[Request], Awaitable[Response]]:
        """An endpoint that checks access and sends a page."""
        from starlette.responses import Response

        async def respond(request: Request) -> Response:
            try:
                self._check(request)
            except Refusal as refusal:
                return _refused(refusal)
            page = find(request)
            return Response(page.content, headers={**page.headers, **_NO_SNIFFING})

        return respond

    def _check(self, request: Request) -> None:
        """Refuses forbidden requests and overlong headers (h11 only bounds incomplete ones)."""
        limit = self._service.limits.header_bytes
        size = len(request.scope["raw_path"]) + len(request.scope["query_string"])
        if size + sum(len(name) + len(value) for name, value in request.scope["headers"]) > limit:
            raise Refusal(431, f"The headers are longer than {limit} bytes.", code="too_long", headers=_CLOSE)
        self._access.check(request.url.path, request.headers)

    async def _respond(self, name: str, act: Act, request: Request) -> Response:
        from starlette.responses import Response

        metrics = self._service.metrics
        status = 500
        try:
            self._check(request)
            reply = await _while_connected(request, act)
            status = reply.status
            return _response(reply, metrics.disconnects.inc)
        except Refusal as refusal:
            status = refusal.status
            return _refused(refusal)
        except _ClientDisconnected:
            status = _CLIENT_DISCONNECTED
            metrics.disconnects.inc()
            return Response(status_code=_CLIENT_DISCONNECTED)
        except Exception:
            log.error(f"{request.method} {request.url.path} failed:\n{traceback.format_exc()}")
            return _refused(broken())
        finally:
            metrics.requests.labels(name, str(status)).inc()


async def _of_body(act: Callable[[bytes], Awaitable[Reply]], request: Request, limits: ServerLimits) -> Reply:
    return await act(await _json_body(request, limits))


async def _at_once(act: Callable[..., Reply], **values: Any) -> Reply:
    return act(**values)


def _metrics_page(service: Service, request: Request) -> Page:
    content, media_type = service.metrics.exposition(request.headers.get("accept", ""))
    return Page(content, {"Content-Type": media_type, "Cache-Control": "no-store"})


def _response(reply: Reply, note_disconnect: Callable[[], None]) -> Response:
    from starlette.responses import JSONResponse

    if reply.events is not None:
        return _stream(reply.first_event, reply.events, note_disconnect)
    headers = {"Content-Type": "application/json; charset=utf-8", **_NO_SNIFFING, **reply.headers}
    return JSONResponse(reply.content, reply.status, headers)


def _stream(first: bytes, events: AsyncGenerator[bytes, None], note_disconnect: Callable[[], None]) -> Response:
    """A response of server-sent events; the generator is closed however the response ends."""
    from starlette.responses import StreamingResponse
    from starlette.types import Receive, Scope, Send

    is_complete = False

    async def content() -> AsyncGenerator[bytes, None]:
        nonlocal is_complete
        yield first
        async for one in events:
            yield one
        is_complete = True

    class Events(StreamingResponse):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            try:
                async with aclosing(events):
                    await super().__call__(scope, receive, send)
            finally:
                if not is_complete:
                    note_disconnect()

    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache", **_NO_SNIFFING}
    return Events(content(), headers=headers)


def _refused(refusal: Refusal) -> Response:
    from starlette.responses import JSONResponse

    headers = {"Content-Type": "application/json; charset=utf-8", **_NO_SNIFFING, **refusal.headers}
    return JSONResponse(refusal.to_json(), refusal.status, headers)


def _routing_refusal(request: Request, failure: Exception) -> Refusal:
    headers: Mapping[str, str] = getattr(failure, "headers", None) or {}
    shown = printable(request.url.path, 100, quoted=False)
    if getattr(failure, "status_code", 404) == 405:
        return Refusal(405, f"{shown} does not support {request.method}.", code="method_not_allowed", headers=headers)
    return Refusal(404, f"Unknown path {shown}. docs/serving.md lists the endpoints.", code="not_found")


async def _while_connected(request: Request, act: Act) -> Reply:
    """Runs an action, and cancels it if the client disconnects.

    Raises:
        _ClientDisconnected: the client disconnected first.
    """
    from starlette.requests import ClientDisconnect

    is_read = asyncio.Event()
    request.state.is_read = is_read

    async def disconnect() -> None:
        await is_read.wait()  # until then the action reads from the connection
        while (await request.receive())["type"] != "http.disconnect":
            pass

    acting, disconnecting = asyncio.ensure_future(act(request)), asyncio.ensure_future(disconnect())
    if request.method != "POST":
        is_read.set()
    try:
        await asyncio.wait({acting, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not acting.done():
            raise _ClientDisconnected
        return acting.result()
    except ClientDisconnect as failure:
        raise _ClientDisconnected from failure
    finally:
        acting.cancel()
        disconnecting.cancel()
        await asyncio.gather(acting, disconnecting, return_exceptions=True)


async def _json_body(request: Request, limits: ServerLimits) -> bytes:
    """The body of a request, which must be JSON and arrive within the limits.

    Raises:
        Refusal: another content type, too long, or too slow.
    """
    reader = _BodyReader(request)
    try:
        _check_head(request.headers, limits)
        body = await asyncio.wait_for(reader.read(limits.body_bytes), limits.body_seconds)
    except asyncio.TimeoutError as failure:
        text = f"The body did not arrive within {limits.body_seconds:g} s."
        raise Refusal(408, text, code="timeout", headers=_CLOSE) from failure
    except Refusal:
        if "expect" not in request.headers:  # a client that waits for 100 Continue has not sent the body
            await reader.drain()
        raise
    request.state.is_read.set()
    return body


def _check_head(headers: Mapping[str, str], limits: ServerLimits) -> None:
    """Checks the headers that describe a body.

    Raises:
        Refusal: not JSON, or too long.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        shown = printable(kind, 60, quoted=False) or "none"
        raise Refusal(415, f"The body must be JSON; send Content-Type: application/json, not {shown}.", headers=_CLOSE)
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise Refusal(415, "The body must not be compressed; send it without Content-Encoding.", headers=_CLOSE)
    if "transfer-encoding" in headers and "content-length" in headers:
        raise Refusal(400, "Content-Length and Transfer-Encoding cannot be combined.", headers=_CLOSE)
    length = headers.get("content-length", "0")
    if not length.isdecimal() or len(length) > 18 or int(length) > limits.body_bytes:
        raise _too_long(limits.body_bytes)


def _too_long(max_bytes: int) -> Refusal:
    return Refusal(413, f"The body is longer than {max_bytes} bytes.", code="too_long", headers=_CLOSE)


class _BodyReader:
    """Reads the body of a request, and keeps track of its end."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._is_over = False

    async def read(self, max_bytes: int) -> bytes:
        """The whole body.

        Raises:
            Refusal: it is longer than `max_bytes`.
            ClientDisconnect: the client disconnected.
        """
        from starlette.requests import ClientDisconnect

        content = bytearray()
        while not self._is_over:
            part = await self._part()
            if part is None:
                raise ClientDisconnect
            content += part
            if len(content) > max_bytes:
                raise _too_long(max_bytes)
        return bytes(content)

    async def drain(self) -> None:
        """Discards the rest of the body, within bounds.

        If a connection is closed with unread data, the client's system may discard the answer.
        """
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._discard(_DRAINED_BYTES), _DRAINED_SECONDS)

    async def _discard(self, max_bytes: int) -> None:
        while not self._is_over and max_bytes > 0:
            max_bytes -= len(await self._part() or b"")

    async def _part(self) -> bytes | None:
        """The next part; None if the client left."""
        message = await self._request.receive()
        self._is_over = message["type"] == "http.disconnect" or not message.get("more_body", False)
        part: bytes = message.get("body", b"")
        return None if message["type"] == "http.disconnect" else part


def _query(request: Request) -> dict[str, str]:
    """The parameters of a query.

    Raises:
        Refusal: parameters that are not UTF-8, too many, or repeated.
    """
    try:
        text = request.scope["query_string"].decode("ascii")
        pairs = parse_qsl(text, keep_blank_values=True, errors="strict", max_num_fields=16)
    except (UnicodeDecodeError, ValueError) as failure:
        raise invalid(f"The query is not UTF-8 in percent-encoding: {printable(str(failure), quoted=False)}.") from None
    parameters: dict[str, Any] = dict(pairs)
    if len(parameters) < len(pairs):
        raise invalid("A parameter of the query is repeated.")
    return parameters


@dataclass(frozen=True)
class Page:
    """A page and its response headers."""

    content: bytes
    headers: Mapping[str, str]


def read_page() -> Page:
    """Reads the page, with a policy that allows only its own script and style, and connections to this server."""
    content = _FILE.read_bytes()
    policy = "; ".join(
        (
            "default-src 'none'",
            f"script-src {_hashes(content, 'script')}",
            f"style-src {_hashes(content, 'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        )
    )
    return Page(
        content,
        {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Security-Policy": policy,
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        },
    )


def _hashes(content: bytes, element: str) -> str:
    """The policy's sources: a hash of each inline element of this kind."""
    scripts = re.findall(rf"<{element}>(.*?)</{element}>".encode(), content, flags=re.S)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'" for text in scripts)
