"""Serves the dashboard over HTTP on the loopback address: the page, curves as numbers, and server-sent events.

Requests name runs by number, and files of the page by their names in a table: no request can name a path.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import socket
import threading
import traceback
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, parse_qsl, urlsplit

import numpy as np

from megatron import log
from megatron.errors import ConfigError
from trident.dashboard.board import Board
from trident.dashboard.configuration import differences, given
from trident.dashboard.followed_run import DashboardRun, View
from trident.dashboard.table import AXES

ADDRESS = "127.0.0.1"
_PAGE = Path(__file__).with_name("page")
_MEDIA_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
_HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",
}
_MOST_POINTS = 20_000
_MOST_CONNECTIONS = 128
_IDLE_SECONDS = 60.0
_KEEP_ALIVE_SECONDS = 10.0
_EVENT_SECONDS = 0.4
_MOST_QUERY_FIELDS = 32
_RUN_NUMBER = re.compile(r"[0-9]{1,9}")

# Maps a path and headers (lower-case names) to the status and reason of a refusal, or None.
Check = Callable[[str, Mapping[str, str]], "tuple[int, str] | None"]
# Maps a folder to its checkpoints as JSON objects.
ListCheckpoints = Callable[[Path], "list[dict[str, Any]]"]


class _RequestError(Exception):
    """An invalid request."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


def read_page() -> dict[str, tuple[str, bytes]]:
    """Reads the files of the page: media type and content by path."""
    files = {}
    for path in sorted(_PAGE.iterdir()):
        kind = _MEDIA_TYPES.get(path.suffix)
        if kind is not None:
            files["/" if path.name == "index.html" else f"/{path.name}"] = (f"{kind}; charset=utf-8", path.read_bytes())
    return files


class DashboardServer(ThreadingHTTPServer):
    """Serves a board on the loopback address.

    Args:
        port: 0 selects a free one.
        check: see `Check`.
        list_checkpoints: see `ListCheckpoints`.

    Raises:
        ConfigError: the port cannot be opened.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(self, board: Board, port: int, check: Check, list_checkpoints: ListCheckpoints) -> None:
        self.board = board
        self.check = check
        self.list_checkpoints = list_checkpoints
        self.page = read_page()
        self._free = threading.BoundedSemaphore(_MOST_CONNECTIONS)
        try:
            super().__init__((ADDRESS, port), _Connection)
        except (OSError, OverflowError) as failure:
            reason = getattr(failure, "strerror", None) or failure
            raise ConfigError(
                f"--port {port} cannot be opened: {reason}. Choose another port, or 0 for a free one."
            ) from failure

    @property
    def address(self) -> str:
        """The URL of the page."""
        return f"http://{ADDRESS}:{self.server_address[1]}"

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handles a request in a new thread, up to a maximum number of threads."""
        if not self._free.acquire(blocking=False):
            self.shutdown_request(request)
            return
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores clients that disconnect."""


class _Connection(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version = "dashboard"
    sys_version = ""
    timeout = _IDLE_SECONDS
    server: DashboardServer

    def setup(self) -> None:
        super().setup()
        self.connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def log_message(self, format: str, *values: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        try:
            self._answer()
        except _RequestError as refused:
            self._send_json({"error": str(refused)}, refused.status)
        except OSError:  # the client disconnected
            self.close_connection = True
        except Exception:
            log.error(f"{self.path[:200]!r} failed:\n{traceback.format_exc()}")
            self._send_json({"error": "The dashboard failed; see its terminal."}, 500)

    def _answer(self) -> None:
        parts, query = _address(self.path)
        headers = {name.lower(): value for name, value in self.headers.items()}
        refused = self.server.check(parts.path, headers)
        if refused is not None:
            raise _RequestError(*refused)
        known = self.server.page.get(parts.path)
        if known is not None:
            self._send(known[1], known[0])
        elif parts.path == "/api/runs":
            folders = [str(folder) for folder in self.server.board.folders]
            self._send_json({"folders": folders, "runs": self.server.board.summaries()})
        elif parts.path == "/api/events":
            self._send_events()
        elif parts.path == "/api/curves":
            self._send(self._curves(query), "application/octet-stream")
        elif parts.path == "/api/configurations":
            self._send_json(self._configurations(query))
        elif parts.path in ("/api/details", "/api/log", "/api/checkpoints"):
            self._send_json(self._of_run(parts.path.rpartition("/")[2], query))
        else:
            raise _RequestError(404, "No such page.")

    def _of_run(self, what: str, query: Mapping[str, str]) -> dict[str, Any]:
        (run,) = self._runs(query, "run")
        if what == "details":
            return run.details()
        if what == "log":
            text, size_bytes = run.log_tail()
            return {"text": text, "size_bytes": size_bytes}
        folder = run.save_folder()
        checkpoints = [] if folder is None else self.server.list_checkpoints(folder)
        return {"folder": None if folder is None else str(folder), "checkpoints": checkpoints}

    def _configurations(self, query: Mapping[str, str]) -> dict[str, Any]:
        runs = self._runs(query, "runs")
        tables = [run.configuration_rows() for run in runs]
        return {
            "runs": [
                {"id": run.number, "rows": table, "given": given(run.configuration())}
                for run, table in zip(runs, tables, strict=True)
            ],
            "differences": differences(tables),
        }

    def _curves(self, query: Mapping[str, str]) -> bytes:
        metric, axis = query.get("metric", ""), query.get("axis", "steps")
        if axis not in AXES:
            raise _RequestError(400, f"axis must be one of {', '.join(AXES)}.")
        start, end = _number(query, "from", -math.inf), _number(query, "to", math.inf)
        view = View(
            axis,
            int(min(max(_number(query, "points", 500), 2), _MOST_POINTS)),
            min(max(_number(query, "weight", 0.0), 0.0), 0.9999),
            None if start == -math.inf and end == math.inf else (start, end),
            query.get("scale") == "log",
        )
        entries: list[dict[str, Any]] = []
        arrays: list[bytes] = []
        for run in self._runs(query, "runs"):
            version = run.version
            for group, curve in run.curves(metric, view):
                entry = {"run": run.number, "version": version, "group": group, "count": len(curve.x)}
                entries.append({**entry, "extent": curve.extent})
                arrays.append(curve.x.astype("<f8").tobytes())
                with np.errstate(over="ignore"):
                    arrays += [part.astype("<f4").tobytes() for part in (curve.low, curve.high, curve.line)]
                arrays.append(bytes(4 * (len(curve.x) % 2)))
        head = json.dumps(entries, allow_nan=False).encode()
        head += b" " * (-(len(head) + 4) % 8)
        return b"".join([np.uint32(len(head)).astype("<u4").tobytes(), head, *arrays])

    def _runs(self, query: Mapping[str, str], name: str) -> list[DashboardRun]:
        numbers = query.get(name, "").split(",") if query.get(name) else []
        known = self.server.board.runs
        chosen = (int(number) for number in numbers if _RUN_NUMBER.fullmatch(number))
        runs = [known[number] for number in chosen if number in known]
        if not runs:
            raise _RequestError(404, "No such run.")
        return runs

    def _send_events(self) -> None:
        board = self.server.board
        self._send_head(200, {"Content-Type": "text/event-stream; charset=utf-8", "Connection": "close"})
        self.close_connection = True
        if self.command == "HEAD":
            return
        known: dict[int, int] = {}
        changes = -1
        with contextlib.suppress(OSError):
            while not board.is_stopping:
                changes = board.wait(changes, _KEEP_ALIVE_SECONDS)
                changed = board.summaries(known)
                text = f"event: runs\ndata: {_json(changed)}\n\n" if changed else ": keep-alive\n\n"
                self.wfile.write(text.encode())
                self.wfile.flush()
                board.pause(_EVENT_SECONDS)

    def _send_json(self, value: Any, status: int = 200) -> None:
        self._send(_json(value).encode(), "application/json; charset=utf-8", status)

    def _send(self, content: bytes, kind: str, status: int = 200) -> None:
        with contextlib.suppress(OSError):
            self._send_head(status, {"Content-Type": kind, "Content-Length": str(len(content))})
            if self.command != "HEAD":
                self.wfile.write(content)

    def _send_head(self, status: int, headers: Mapping[str, str]) -> None:
        self.send_response(status, HTTPStatus(status).phrase)
        for name, value in {**_HEADERS, **headers}.items():
            self.send_header(name, value)
        self.end_headers()


def _address(path: str) -> tuple[SplitResult, dict[str, str]]:
    """Splits a request's path, and parses its query."""
    try:
        parts = urlsplit(path)
        return parts, dict(parse_qsl(parts.query, max_num_fields=_MOST_QUERY_FIELDS))
    except ValueError:
        most = _MOST_QUERY_FIELDS
        raise _RequestError(400, f"Invalid URL; its query may have at most {most} fields.") from None


def _number(query: Mapping[str, str], name: str, otherwise: float) -> float:
    try:
        value = float(query.get(name, otherwise))
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise _RequestError(400, f"{name} must be a number.")
    return value


def _json(value: Any) -> str:
    return json.dumps(_finite(value), allow_nan=False)


def _finite(value: Any) -> Any:
    """Replaces NaN and infinities, which JSON lacks, with null."""
    if isinstance(value, dict):
        return {name: _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
