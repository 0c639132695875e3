"""Sockets: slow, superfluous and malformed connections."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from typing import Any

import pytest

from megatron.errors import ConfigError
from tests.trident.serve.fakes import FakeEngine
from tests.trident.serve.listening import get, listening, post, read_all
from trident.serve.network import WebThread, address_of, listen
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.served_model import ServedModel

ASK = {"prompt": "a", "max_tokens": 5}


def status_of(answer: bytes) -> int:
    """The status of a response; 0 if there is none."""
    return int(answer.split(b" ", 2)[1]) if answer else 0


def test_a_port_is_opened_once() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        assert address_of(listener) == f"http://127.0.0.1:{port}"
        with pytest.raises(
            ConfigError, match=f"--host 127.0.0.1 --port {port} cannot be opened: Address already in use"
        ):
            listen("127.0.0.1", port)
    with pytest.raises(ConfigError, match=r"--host 192\.0\.2\.1 --port 0 cannot be opened"):
        listen("192.0.2.1", 0)


def test_an_ipv6_address_is_written_in_brackets() -> None:
    try:
        listener = listen("::1", 0)
    except ConfigError as failure:
        pytest.skip(f"there is no IPv6 here: {failure}")
    with listener:
        assert address_of(listener).startswith("http://[::1]:")


@pytest.mark.parametrize(
    "raw",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # the beginning of TLS
        b"GET /\r\n\r\n",
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nabcdef",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: gzip\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nBad Header: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: localhost\r\nX: a\x00b\r\n\r\n",
        b"GET /\xff\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
    ],
)
def test_invalid_http_is_refused_and_the_connection_closed(served: ServedModel, raw: bytes) -> None:
    with listening(served) as running:
        answer = running.send(raw)
        assert status_of(answer) in (400, 501)
        assert json.loads(answer.partition(b"\r\n\r\n")[2])["error"]["code"] == "bad_http"
        assert status_of(running.send(get("/health"))) == 200


def test_a_missing_or_repeated_host_is_named(served: ServedModel) -> None:
    with listening(served) as running:
        for raw in (b"GET / HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\nHost: localhost\r\nHost: evil\r\n\r\n"):
            assert b"must have exactly one Host header" in running.send(raw)
        assert b"is not valid HTTP" in running.send(b"GET /\r\n\r\n")


@pytest.mark.parametrize("kind", ["application/json", "text/plain"])
def test_a_client_that_sends_its_whole_body_first_gets_the_refusal(served: ServedModel, kind: str) -> None:
    """Nothing of the answer is lost to unread data, whether the length was announced or not."""
    size = 4 << 20
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: {kind}\r\n"
    bodies = (
        f"Content-Length: {size}\r\n\r\n".encode() + b"x" * size,
        f"Transfer-Encoding: chunked\r\n\r\n{size:x}\r\n".encode() + b"x" * size + b"\r\n0\r\n\r\n",
    )
    with listening(served, limits=ServerLimits(body_bytes=1000)) as running:
        for body in bodies:
            with running.connect() as connection:
                connection.sendall(head.encode() + body)
                answer = connection.makefile("rb").read()  # raises if the connection was reset
            assert status_of(answer) == (413 if kind == "application/json" else 415)
        with running.connect() as connection:  # one that never ends is not waited for
            connection.sendall(head.encode() + b"Content-Length: 900000\r\n\r\nabc")
            assert status_of(read_all(connection)) in (413, 415)
        with running.connect() as connection:  # one that waits for permission is answered at once
            connection.sendall(head.encode() + b"Expect: 100-continue\r\nContent-Length: 900000\r\n\r\n")
            assert status_of(read_all(connection)) in (413, 415)


def test_two_lengths_of_a_body_hide_no_second_request(served: ServedModel) -> None:
    """Of Content-Length and Transfer-Encoding, a proxy may believe one and the server the other."""
    smuggled = b"0\r\n\r\n" + get("/v1/models")
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(smuggled)}\r\nTransfer-Encoding: chunked\r\n\r\n"
    with listening(served) as running:
        answer = running.send(head.encode() + smuggled)
        assert status_of(answer) == 400 and answer.count(b"HTTP/1.1") == 1


def test_requests_follow_each_other_on_one_connection(served: ServedModel) -> None:
    with listening(served) as running:
        answer = running.send(post(ASK, closes=False) * 3 + get("/health"))
        assert answer.count(b"HTTP/1.1 200") == 4 and answer.count(b'"text_completion"') == 3


def test_headers_must_come_in_time(served: ServedModel) -> None:
    limits = ServerLimits(header_seconds=0.2, idle_seconds=0.2)
    with listening(served, limits=limits) as running, running.connect() as silent, running.connect() as slow:
        slow.sendall(b"GET / HTTP/1.1\r\nHost: loc")
        assert read_all(silent) == b"" and read_all(slow) == b""
        assert status_of(running.send(get("/health"))) == 200


def test_a_body_must_come_in_time(served: ServedModel) -> None:
    with listening(served, limits=ServerLimits(body_seconds=0.2)) as running, running.connect() as slow:
        slow.sendall(post(ASK)[:-5])
        answer = read_all(slow)
        assert status_of(answer) == 408 and b"did not arrive within 0.2 s" in answer


def test_a_client_that_reads_nothing_is_dropped(served: ServedModel) -> None:
    """It sends requests without reading answers, which then fill all buffers."""
    limits = ServerLimits(stall_seconds=0.3)
    with listening(served, limits=limits) as running, running.connect() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.settimeout(10)
        dropped = False
        try:
            for _ in range(1000):
                deaf.sendall(get("/").replace(b"Connection: close\r\n", b"") * 100)
                time.sleep(0.02)
        except (ConnectionError, TimeoutError):
            dropped = True
        assert dropped and status_of(running.send(get("/health"))) == 200


def test_too_many_connections_are_refused(served: ServedModel) -> None:
    with listening(served, limits=ServerLimits(connections=3)) as running:
        held = [running.connect() for _ in range(3)]
        assert b"The limit of 3 connections is reached" in (answer := running.send(get("/health")))
        assert status_of(answer) == 503
        held.pop().close()
        ends_at = time.monotonic() + 120
        while status_of(running.send(get("/health"))) != 200:
            assert time.monotonic() < ends_at
        for connection in held:
            connection.close()


def test_long_headers_are_refused_also_if_they_come_at_once(served: ServedModel) -> None:
    for long in (get("/?" + "a" * 17_000), get("/").replace(b"Host", b"X: " + b"x" * 40_000 + b"\r\nHost")):
        with listening(served) as running:
            assert status_of(running.send(long)) in (400, 431)


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_hangs_up_ends_its_answer(served: ServedModel, streams: bool) -> None:
    engine = FakeEngine(step_seconds=0.2)  # 20 s for all tokens
    with listening(served, engine) as running:
        connection = running.connect()
        connection.sendall(post({**ASK, "max_tokens": 100, "stream": streams}))
        while not engine.requests:
            time.sleep(0.005)
        connection.close()
        ends_at = time.monotonic() + 120
        while not engine.cancelled:
            assert time.monotonic() < ends_at
            time.sleep(0.005)
        assert engine.steps < 100


def test_the_log_has_no_line_for_events_that_nobody_reads(caplog: pytest.LogCaptureFixture) -> None:
    is_asked, has_left, is_sent = threading.Event(), threading.Event(), threading.Event()

    async def stream(scope: Any, receive: Any, send: Any) -> None:
        is_asked.set()
        has_left.wait(60)  # holds up the loop, so that it cannot see the client leave
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(20):
            await send({"type": "http.response.body", "body": b"data: {}", "more_body": True})
        is_sent.set()

    web = WebThread(stream, listen("127.0.0.1", 0), ServerLimits())
    web.start()
    client = socket.create_connection(web._listener.getsockname())
    client.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert is_asked.wait(60)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # leaves with a reset
    client.close()
    has_left.set()
    assert is_sent.wait(60)
    web.stop()
    assert caplog.messages == []
