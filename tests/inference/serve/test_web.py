"""The application over HTTP: bodies, methods, access, CORS, disconnects, failures."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import httpx
import pytest

from megatron.inference.serve.access import Access, allowed_hosts
from megatron.inference.serve.requests.limits import Limits
from megatron.inference.serve.requests.served import Served
from megatron.inference.serve.service import Service
from megatron.secret_text import SecretText
from tests.inference.serve.fakes import FakeEngine, Running, running

JSON = {"content-type": "application/json"}
ASK = {"prompt": "a", "max_tokens": 100}


def talk(
    served: Served,
    act: Callable[[Running], Awaitable[Any]],
    engine: FakeEngine | None = None,
    limits: Limits | None = None,
    access: Access | None = None,
) -> Any:
    """What `act` returns with a running service."""

    async def whole() -> Any:
        async with running(served, engine, limits, access) as service:
            return await act(service)

    return asyncio.run(whole())


def post(served: Served, content: Any, limits: Limits | None = None, **headers: str) -> httpx.Response:
    """The response to a body that is sent to /v1/completions."""

    async def act(service: Running) -> httpx.Response:
        sent = {**JSON, **{name.replace("_", "-"): value for name, value in headers.items()}}
        return await service.http.post("/v1/completions", content=content, headers=sent)

    response: httpx.Response = talk(served, act, limits=limits)
    return response


async def in_parts(*parts: bytes, seconds: float = 0) -> AsyncIterator[bytes]:
    """A body without a length, which may take its time."""
    for part in parts:
        yield part
        await asyncio.sleep(seconds)


def test_a_body_within_the_limits_is_read(served: Served) -> None:
    body = json.dumps(ASK).encode()
    assert post(served, body).status_code == 200
    assert post(served, body, content_type="Application/JSON; charset=utf-8").status_code == 200
    assert post(served, body, Limits(body_bytes=len(body))).status_code == 200
    assert post(served, json.dumps({**ASK, "prompt": "a", "user": "x" * 50_000}).encode()).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status", "says"),
    [
        (b"{}", {"content_type": "text/plain"}, 415, "send Content-Type: application/json, not text/plain"),
        (b"{}", {"content_type": ""}, 415, "not none"),
        (b"{}", {"content_encoding": "gzip"}, 415, "must not be compressed"),
        (b"x" * 2000, {}, 413, "The body is longer than 1000 bytes"),
        (in_parts(b"x" * 600, b"x" * 600), {}, 413, "The body is longer than 1000 bytes"),
        (b"{}", {"content_length": "1e3"}, 413, "longer than 1000"),
        (b"{}", {"content_length": "9" * 5000}, 413, "longer than 1000"),
        (b"{}", {"content_length": "2", "transfer_encoding": "chunked"}, 400, "exclude each other"),
        (in_parts(b"{", b"}", seconds=2), {}, 408, "The body did not arrive within 0.1 s"),
        (b"\xff\xfe", {}, 400, "The body is not UTF-8: byte 0 is 0xff"),
        (b"[" * 900, {}, 400, "deeper than 32 levels"),
        (b'{"prompt": ', {}, 400, "The body is not JSON"),
    ],
)
def test_other_bodies_are_refused(served: Served, content: Any, headers: Any, status: int, says: str) -> None:
    limits = Limits(body_bytes=1000, body_seconds=0.1 if status == 408 else 60)
    response = post(served, content, limits, **headers)
    assert response.status_code == status and says in response.json()["error"]["message"]
    assert (response.headers.get("connection") == "close") == (status != 400 or "exclude" in says)


def test_unknown_places_and_methods_are_refused_in_json(served: Served) -> None:
    async def act(service: Running) -> list[httpx.Response]:
        http = service.http
        wrong = [await http.get("/v2"), await http.get("/v1/completions"), await http.post("/generate")]
        return [
            *wrong,
            await http.get("/v1/models/gpt-4"),
            await http.delete("/v1/models/tiny"),
            await http.get("/health/"),
        ]

    found = talk(served, act)
    assert [response.status_code for response in found] == [404, 405, 405, 404, 405, 404]
    assert all(response.json()["error"]["message"] for response in found)
    assert found[1].headers["allow"] == "POST"
    assert "GET is not a method of /v1/completions" in found[1].text


def test_the_model_is_listed(served: Served) -> None:
    async def act(service: Running) -> list[Any]:
        return [(await service.http.get(path)).json() for path in ("/v1/models", "/v1/models/tiny")]

    listed, one = talk(served, act)
    assert listed == {"object": "list", "data": [one]}
    assert one["id"] == "tiny" and one["object"] == "model" and one["max_model_len"] == 128


def test_access_is_checked_before_anything_else(served: Served) -> None:
    token = "0123456789abcdef-XYZ"
    access = Access(SecretText("***", token), hosts=allowed_hosts("127.0.0.1", ()))

    async def act(service: Running) -> list[int]:
        http, right = service.http, {"Authorization": f"Bearer {token}"}
        paths = ("/", "/health", "/metrics", "/v1/models", "/generate?sentence=a")
        found = [(await http.get(path)).status_code for path in paths]
        found += [(await http.get(path, headers=right)).status_code for path in paths]
        found.append((await http.post("/v1/completions", content=b"broken", headers=JSON)).status_code)
        found += [(await http.get(path, headers={"Host": "evil.example", **right})).status_code for path in paths]
        return found

    assert talk(served, act, access=access) == [200, 200, 401, 401, 401, *[200] * 5, 401, *[421] * 5]


def test_cors_only_where_it_was_asked_for(served: Served) -> None:
    there = "https://other.example"
    ask = {"Origin": there, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "content-type"}

    async def act(service: Running) -> list[httpx.Response]:
        url = "/v1/completions"
        asked = await service.http.post(url, json=ASK, headers={"Origin": there})
        return [asked, await service.http.options(url, headers=ask)]

    plain, preflight = talk(served, act)
    assert (plain.status_code, preflight.status_code) == (403, 405)
    assert not [name for response in (plain, preflight) for name in response.headers if name.startswith("access-")]
    plain, preflight = talk(served, act, access=Access(origins=(there,)))
    assert (plain.status_code, preflight.status_code) == (200, 200)
    assert plain.headers["access-control-allow-origin"] == preflight.headers["access-control-allow-origin"] == there
    assert "POST" in preflight.headers["access-control-allow-methods"]
    _, preflight = talk(served, act, access=Access(origins=("https://third.example",)))
    assert preflight.status_code == 400 and "access-control-allow-origin" not in preflight.headers


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("waits", [False, True])
def test_a_client_that_leaves_costs_nothing_more(served: Served, streams: bool, waits: bool) -> None:
    """In the middle of its answer, or while it waits for others."""
    engine = FakeEngine(step_seconds=0.01, most_running=1)

    async def act(service: Running) -> str:
        others = [service.http.post("/v1/completions", json=ASK)] if waits else []
        running_first = [asyncio.create_task(other) for other in others]
        while waits and not engine.requests:
            await asyncio.sleep(0.005)
        leaving = asyncio.create_task(service.http.post("/v1/completions", json={**ASK, "stream": streams}))
        await asyncio.sleep(0.1)
        leaving.cancel()
        await asyncio.gather(leaving, return_exceptions=True)
        while service.service.jobs.sequences > waits:
            await asyncio.sleep(0.005)
        for other in running_first:
            other.cancel()
        await service.settle()
        return (await service.http.get("/metrics")).text

    metrics = talk(served, act, engine)
    assert engine.steps < 90 and len(engine.requests) == len(engine.cancelled)
    assert "megatron_sequences_outstanding 0.0" in metrics


def test_a_failure_is_logged_and_answered_without_its_words(served: Served, capsys: pytest.CaptureFixture[str]) -> None:
    async def act(service: Running) -> httpx.Response:
        def fail(self: Service) -> None:
            raise ValueError("secret of the server")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Service, "models", fail)
            return await service.http.get("/v1/models")

    response = talk(served, act)
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["code"] == "internal_error"
    assert "GET /v1/models failed" in (said := capsys.readouterr().err) and "secret of the server" in said


def test_every_answer_says_that_its_type_is_meant(served: Served) -> None:
    async def act(service: Running) -> list[httpx.Response]:
        http = service.http
        found = [await http.get(path) for path in ("/", "/health", "/metrics", "/v1/models", "/nothing")]
        return [*found, await http.post("/v1/completions", json={**ASK, "stream": True})]

    for response in talk(served, act):
        assert response.headers["x-content-type-options"] == "nosniff", response.url
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
