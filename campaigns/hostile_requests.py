"""Attacks a server on the loopback: malformed and hostile requests, clients that leave, and what it costs.

    python -m campaigns.run requests --cases 10000 --seed 1

Every request must be refused with a status below 500, be answered, or end with a closed connection, within its time.
Between them a question must get the answer that it got at first, and in the end nothing may be left: no sequence is
being computed, the log has no traceback, and the memory of the process no longer grows.
"""

from __future__ import annotations

import asyncio
import json
import re
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random
from socket import SO_LINGER, SOL_SOCKET
from typing import Any
from urllib.parse import urlsplit

from campaigns.campaign import Plan, Result
from tests.helpers.web.serving import chat_server

CONCURRENT = 16
CASE_SECONDS = 60.0
SERVER = "the server"
_EVERY = 250  # cases between two questions
_MOST_GROWTH_BYTES = 8 << 20
_ALLOWED = {100, 200, 400, 401, 403, 404, 405, 408, 413, 415, 421, 431, 503}
_COMPLETIONS, _CHAT = "/v1/completions", "/v1/chat/completions"
_FIELDS = (
    "model", "prompt", "messages", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p",
    "stop", "seed", "logprobs", "top_logprobs", "echo", "stream", "stream_options", "presence_penalty", "logit_bias",
    "frequency_penalty", "repetition_penalty", "typical_p", "best_of", "suffix", "user", "tools", "response_format",
    "unknown", "", "__proto__", "\u0000", "ş" * 300,
)  # fmt: skip
_VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3.5, 1e308, -1e308, 10**30, 10**400, 2**63, "", "a", "\u0000", "x" * 20_000, "👍",
    "\ud800", [], [[]], [None], [1] * 300, [-1], [10**30], [[1, 2], [3]], ["a", 1], ["a"] * 200, {}, {"a": 1},
    {"1": 1e300}, {"include_usage": "x"}, {"type": "json_object"}, [{"role": "user"}], [{"role": "x", "content": "y"}],
    [{"role": "user", "content": [{"type": "text", "text": "a"}] * 300}], [{"role": "user", "content": "word " * 5000}],
    [{"role": "user", "content": "<s></s><usr><sys>"}] * 50, "nan", "1", "true",
)  # fmt: skip
_BIASES: tuple[Any, ...] = (
    {"100": 100}, {"5": -100, "6": 0.5}, [[1, 2]], [[1, 2.5], [1, 3]], {}, {"0": 0}, {"100": "1"}, {"100": True}, [[1]],
)  # fmt: skip
_BODIES = (
    b"", b"{", b"null", b"[]", b'"', b"\xff\xfe\xfd", b'{"prompt": "\xc3\x28"}', b'{"prompt": NaN}', b'{"a":1,"a":2}',
    b"[" * 100_000, b'{"a":' * 50_000, b'{"prompt": ' + b"[" * 40 + b"]" * 40 + b"}", b'{"n": ' + b"9" * 100_000 + b"}",
    b'{"prompt": "' + b'\\"' * 100_000, b'{"prompt": "\\ud800"}', b"\x00" * 5000, b'{"prompt": "a"}' * 2, b"1e999",
    b'{"' + b"k" * 100_000 + b'": 1}', b"{" + b",".join(b'"%d":1' % n for n in range(20_000)) + b"}", b" " * 200_000,
)  # fmt: skip
_LINES = (
    b"GET / HTTP/9.9", b"GET /", b"", b"\r\n\r\n", b"PRI * HTTP/2.0", b"CONNECT x:1 HTTP/1.1", b"get / HTTP/1.1",
    b"GET /../../etc/passwd HTTP/1.1", b"GET /%2e%2e%2f%00 HTTP/1.1", b"GET http://evil.example/ HTTP/1.1",
    b"OPTIONS * HTTP/1.1", b"TRACE / HTTP/1.1", b"GET /" + b"a" * 70_000 + b" HTTP/1.1", b"GET /\xff HTTP/1.1",
    b"GET /generate?sentence=%ff HTTP/1.1", b"GET /generate?" + b"&".join([b"sentence=a"] * 500) + b" HTTP/1.1",
    b"GET /v1/models/%00 HTTP/1.1", b"DELETE /v1/models HTTP/1.1", b"POST / HTTP/1.1", b"HEAD /metrics HTTP/1.1",
)  # fmt: skip
_HEADERS = (
    b"Content-Length: 5", b"Content-Length: -1", b"Content-Length: 1e9", b"Content-Length: " + b"9" * 400,
    b"Content-Length: 0", b"Transfer-Encoding: chunked", b"Transfer-Encoding: gzip, chunked",
    b"Transfer-Encoding: identity", b"Host: evil.example", b"Host: localhost:1", b"Host:", b"Host : x",
    b"Content-Type: text/plain", b"Content-Encoding: gzip", b"Expect: 100-continue", b"Connection: upgrade",
    b"Upgrade: websocket", b"Upgrade: h2c", b"Origin: https://evil.example", b"Sec-Fetch-Site: cross-site",
    b"Authorization: Bearer \xff", b"X: " + b"x" * 30_000, b" folded", b"X\x00: y", b"X: a\x00b", b"X: a\rb", b": x",
    b"Cookie: " + b"a=b; " * 2000, b"Range: bytes=0-1", b"Accept: " + b"application/openmetrics-text," * 200,
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A request as bytes, and what its client does then.

    Args:
        leaves: whether the client closes the connection without reading all of the answer: "now" or "later" (after the
            first bytes), with a reset or not.
    """

    kind: str
    raw: bytes
    leaves: str = ""
    resets: bool = False


def make_case(draw: Random) -> Case:
    """A random case."""
    return draw.choice(_KINDS)(draw)


def _request(body: bytes, path: str = _COMPLETIONS) -> bytes:
    head = [f"POST {path} HTTP/1.1".encode(), b"Host: localhost", b"Content-Type: application/json"]
    return b"\r\n".join([*head, b"Content-Length: %d" % len(body), b"Connection: close", b"", b""]) + body


def _usual(draw: Random, **changes: Any) -> dict[str, Any]:
    values = {"max_tokens": draw.randrange(1, 6), "stream": draw.random() < 0.5, "seed": 1}
    return {**values, **changes}


def _wrong_values(draw: Random) -> Case:
    """Fields of any type and size in a body that is JSON."""
    path = draw.choice((_COMPLETIONS, _CHAT))
    required = {"prompt": "a"} if path == _COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    values = _usual(draw, **required)
    for _ in range(draw.choice((0, 1, 1, 2, 3))):  # the right ones among them must be answered
        values[draw.choice(_FIELDS)] = draw.choice(_VALUES)
    if draw.random() < 0.2:
        values["logit_bias"] = draw.choice(_BIASES)
    return Case("wrong values", _request(json.dumps(values).encode(), path))


def _bodies(draw: Random) -> Case:
    """Bodies that are not the JSON that is wanted."""
    body = draw.choice(_BODIES)
    if draw.random() < 0.3:
        body = bytes(draw.randrange(256) for _ in range(draw.randrange(300)))
    return Case("bodies", _request(body, draw.choice((_COMPLETIONS, _CHAT))))


def _damaged(draw: Random) -> Case:
    """A right request with some bytes changed, removed or doubled, or cut short."""
    raw = bytearray(_request(json.dumps(_usual(draw, prompt="some text")).encode()))
    for _ in range(draw.choice((1, 2, 8))):
        place = draw.randrange(len(raw))
        change = draw.randrange(4)
        if change == 0:
            raw[place] ^= 1 << draw.randrange(8)
        elif change == 1:
            del raw[place : place + draw.randrange(1, 9)]
        elif change == 2:
            raw[place:place] = raw[place : place + draw.randrange(1, 40)]
        else:
            del raw[place:]
            break
        if not raw:
            break
    return Case("damaged", bytes(raw), leaves="soon")


def _heads(draw: Random) -> Case:
    """Request lines and headers that are wrong, repeated, contradictory or huge."""
    line = draw.choice(_LINES) if draw.random() < 0.5 else b"POST /v1/completions HTTP/1.1"
    headers = [draw.choice(_HEADERS) for _ in range(draw.choice((1, 2, 3, 60)))]
    body = draw.choice((b"", b"0\r\n\r\nGET / HTTP/1.1\r\n\r\n", b'{"prompt": "a"}', b"5\r\nabcde\r\nzz\r\n"))
    usual = [b"Host: localhost", b"Content-Type: application/json"] if draw.random() < 0.8 else []
    return Case("heads", b"\r\n".join([line, *usual, *headers, b"", b""]) + body, leaves="soon")


def _noise(draw: Random) -> Case:
    """Anything but HTTP."""
    return Case("noise", draw.randbytes(draw.choice((1, 10, 300, 20_000))), leaves="soon")


def _leavers(draw: Random) -> Case:
    """A right request, mostly for a long stream, whose client goes away."""
    values = _usual(draw, prompt="a", n=draw.choice((1, 3)), max_tokens=200, stream=draw.random() < 0.7)
    raw = json.dumps(values).encode()
    return Case("leavers", _request(raw), draw.choice(("now", "later", "later")), resets=draw.random() < 0.5)


_KINDS: tuple[Callable[[Random], Case], ...] = (
    _wrong_values, _wrong_values, _wrong_values, _bodies, _bodies, _damaged, _heads, _heads, _noise, _leavers,
)  # fmt: skip


async def send(port: int, case: Case) -> tuple[str, bytes]:
    """The result of a case: a status, "closed" or "left"; and the answer."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(case.raw)
        if case.resets:
            writer.get_extra_info("socket").setsockopt(SOL_SOCKET, SO_LINGER, struct.pack("ii", 1, 0))
        if case.leaves == "now":
            return "left", b""
        if case.leaves == "later":
            return "left", await reader.read(100)
        try:  # a request that was cut short waits for the rest, which does not come
            answer = await asyncio.wait_for(reader.read(), 0.5 if case.leaves == "soon" else CASE_SECONDS)
        except asyncio.TimeoutError:
            if case.leaves == "soon":
                return "left", b""
            raise
        found = re.match(rb"HTTP/1\.1 (\d{3}) ", answer)
        return (found.group(1).decode() if found else "closed"), answer
    except (ConnectionError, BrokenPipeError):
        return "closed", b""
    finally:
        writer.close()


async def ask(port: int) -> str:
    """The answer to a question whose answer never changes."""
    body = json.dumps({"prompt": "What is this?", "temperature": 0, "max_tokens": 12}).encode()
    status, answer = await send(port, Case("question", _request(body)))
    return answer.partition(b'"choices":')[2].partition(b',"usage"')[0].decode() if status == "200" else f"{status}?"


async def metric(port: int, name: str) -> float:
    """A number that the server reports."""
    raw = b"GET /metrics HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
    _, answer = await send(port, Case("metrics", raw))
    found = re.search(rf"^{name} (\S+)$", answer.decode(), flags=re.M)
    return float(found.group(1)) if found else float("nan")


async def attack(port: int, plan: Plan) -> list[Result]:
    """Sends the cases, several at the same time, and checks the server between them."""
    expected = await ask(port)
    results: list[Result] = []
    if "?" in expected[-1:]:
        results.append(Result(-1, SERVER, "", f"no answer before the first case: {expected}"))
    slots = asyncio.Semaphore(CONCURRENT)

    async def send_one(number: int) -> None:
        case = make_case(plan.random(number))
        async with slots:
            try:
                status, answer = await send(port, case)
            except Exception as failure:
                status, answer = "failed", repr(failure).encode()
        is_wrong = status == "failed" or (status.isdecimal() and int(status) not in _ALLOWED)
        results.append(Result(number, case.kind, status, f"{status} {answer[:500]!r}" if is_wrong else ""))

    memory_bytes: list[float] = []
    for first in range(0, len(plan.numbers), _EVERY):
        await asyncio.gather(*(send_one(number) for number in plan.numbers[first : first + _EVERY]))
        answered = await ask(port)
        problem = "" if answered == expected else f"the answer is {answered}, not {expected}"
        results.append(Result(first + _EVERY, SERVER, "answered", problem))
        memory_bytes.append(await metric(port, "process_resident_memory_bytes"))
    return [*results, await _final_check(port, memory_bytes)]


async def _final_check(port: int, memory_bytes: list[float]) -> Result:
    """Checks that nothing is left of the clients, and that the memory no longer grows."""
    ends_at = time.monotonic() + CASE_SECONDS
    while await metric(port, "megatron_sequences_outstanding"):
        if time.monotonic() > ends_at:
            return Result(-1, SERVER, "idle", "sequences of clients that left are still being computed")
        await asyncio.sleep(0.1)
    growth = memory_bytes[-1] - memory_bytes[len(memory_bytes) // 2]
    is_growing = not growth < _MOST_GROWTH_BYTES
    return Result(-1, SERVER, "idle", f"grew by {growth / (1 << 20):.0f} MiB in the second half" if is_growing else "")


def run_cases(plan: Plan) -> Iterator[Result]:
    """Attacks the chat server that the tests of a session share."""
    server = chat_server()
    yield from asyncio.run(attack(int(urlsplit(server.address).port or 0), plan))
    text = server.log.read_text()
    failed = "Traceback" in text or server.process.poll() is not None
    yield Result(-1, SERVER, "clean log", f"the server's log:\n{text[-3000:]}" if failed else "")
