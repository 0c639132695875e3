"""The application over HTTP: bodies, methods, access, CORS, disconnects, failures."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import os
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from megatron.inference.generation import Request
from megatron.secret_text import SecretText
from tests.helpers.web.browser import headless_chromium
from tests.trident.serve.fakes import FakeEngine, Running, running
from tests.trident.serve.listening import Listening, listening
from trident.serve.access import Access, allowed_hosts
from trident.serve.requests.limits import ServerLimits
from trident.serve.requests.served_model import ServedModel
from trident.serve.service import Service
from trident.serve.web import read_page

JSON = {"content-type": "application/json"}
ASK = {"prompt": "a", "max_tokens": 100}


def talk(
    served: ServedModel,
    act: Callable[[Running], Awaitable[Any]],
    engine: FakeEngine | None = None,
    limits: ServerLimits | None = None,
    access: Access | None = None,
) -> Any:
    """Runs `act` with a service; returns its result."""

    async def whole() -> Any:
        async with running(served, engine, limits, access) as service:
            return await act(service)

    return asyncio.run(whole())


def post(served: ServedModel, content: Any, limits: ServerLimits | None = None, **headers: str) -> httpx.Response:
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


def test_a_body_within_the_limits_is_read(served: ServedModel) -> None:
    body = json.dumps(ASK).encode()
    assert post(served, body).status_code == 200
    assert post(served, body, content_type="Application/JSON; charset=utf-8").status_code == 200
    assert post(served, body, ServerLimits(body_bytes=len(body))).status_code == 200
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
        (b"{}", {"content_length": "2", "transfer_encoding": "chunked"}, 400, "cannot be combined"),
        (in_parts(b"{", b"}", seconds=2), {}, 408, "The body did not arrive within 0.1 s"),
        (b"\xff\xfe", {}, 400, "The body is not UTF-8: byte 0 is 0xff"),
        (b"[" * 900, {}, 400, "deeper than 32 levels"),
        (b'{"prompt": ', {}, 400, "The body is not JSON"),
    ],
)
def test_other_bodies_are_refused(served: ServedModel, content: Any, headers: Any, status: int, says: str) -> None:
    limits = ServerLimits(body_bytes=1000, body_seconds=0.1 if status == 408 else 60)
    response = post(served, content, limits, **headers)
    assert response.status_code == status and says in response.json()["error"]["message"]
    assert (response.headers.get("connection") == "close") == (status != 400 or "combined" in says)


def test_unknown_places_and_methods_are_refused_in_json(served: ServedModel) -> None:
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
    assert "/v1/completions does not support GET" in found[1].text


def test_the_model_is_listed(served: ServedModel) -> None:
    async def act(service: Running) -> list[Any]:
        return [(await service.http.get(path)).json() for path in ("/v1/models", "/v1/models/tiny")]

    listed, one = talk(served, act)
    assert listed == {"object": "list", "data": [one]}
    assert one["id"] == "tiny" and one["object"] == "model" and one["max_model_len"] == 128


def test_access_is_checked_before_anything_else(served: ServedModel) -> None:
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


def test_cors_only_for_allowed_origins(served: ServedModel) -> None:
    there = "https://other.example"
    headers = {
        "Origin": there,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "content-type",
    }

    async def act(service: Running) -> list[httpx.Response]:
        url = "/v1/completions"
        plain = await service.http.post(url, json=ASK, headers={"Origin": there})
        return [plain, await service.http.options(url, headers=headers)]

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
def test_a_client_that_leaves_costs_nothing_more(served: ServedModel, streams: bool, waits: bool) -> None:
    """In the middle of its answer, or while it waits for others."""
    engine = FakeEngine(step_seconds=0.05, max_running=1)

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


def test_a_failure_is_logged_and_answered_without_its_words(
    served: ServedModel, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_every_answer_forbids_content_sniffing(served: ServedModel) -> None:
    async def act(service: Running) -> list[httpx.Response]:
        http = service.http
        found = [await http.get(path) for path in ("/", "/health", "/metrics", "/v1/models", "/nothing")]
        return [*found, await http.post("/v1/completions", json={**ASK, "stream": True})]

    for response in talk(served, act):
        assert response.headers["x-content-type-options"] == "nosniff", response.url
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"


SAID = "Hello! This is <b>not</b> bold.\n<img src=x onerror=\"document.title='owned'\">\nİstanbul, 漢字, 👍"


def test_the_policy_allows_the_page_its_own_script_and_nothing_else() -> None:
    page = read_page()
    policy = dict(part.split(" ", 1) for part in page.headers["Content-Security-Policy"].split("; "))
    text = page.content.decode()
    script = re.search(r"<script>(.*?)</script>", text, flags=re.S)
    assert script is not None and text.count("<script") == 1 and text.count("<style") == 1
    digest = base64.b64encode(hashlib.sha256(script.group(1).encode()).digest()).decode()
    assert policy["default-src"] == "'none'" and policy["connect-src"] == "'self'"
    assert policy["script-src"] == f"'sha256-{digest}'" and "unsafe" not in page.headers["Content-Security-Policy"]
    assert policy["frame-ancestors"] == policy["form-action"] == policy["base-uri"] == "'none'"


def test_the_page_needs_no_network_and_makes_no_markup() -> None:
    text = read_page().content.decode()
    assert re.findall(r"https?://[^' \"]+", text) == ["http://www.w3.org/2000/svg"]  # the name of a format
    for way in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", " on[a-z]+=", "style="):
        assert not re.search(way if "[" in way else re.escape(way), text), way
    assert "<html lang=" in text and "width=device-width" in text and "prefers-color-scheme: dark" in text


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium."""
    with headless_chromium(tmp_path_factory.mktemp("chromium"), width=1000, height=760) as opened:
        yield opened


class Chat:
    """The page as a user sees it."""

    def __init__(self, browser: Any, running: Listening) -> None:
        self.browser = browser
        browser.get_log("browser")  # of the page before
        browser.get(running.server.address)

    def find(self, selector: str) -> Any:
        """The first element of a selector."""
        return self.browser.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """The texts of elements."""
        return [one.text for one in self.browser.find_elements("css selector", selector)]

    def write(self, *keys: str) -> None:
        """Types into what has the focus, as a user of the keyboard does."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def wait(self, reached: Callable[[], Any]) -> None:
        """Waits until something is so."""
        ends_at = time.monotonic() + 120
        while not reached():
            assert time.monotonic() < ends_at, self.find("body").text
            time.sleep(0.02)

    def is_done(self) -> bool:
        """True if no answer is being generated."""
        return bool(self.find("#send").is_displayed())

    def picture(self, name: str) -> None:
        """Saves what is seen, where MEGATRON_SCREENSHOTS names a folder."""
        folder = os.environ.get("MEGATRON_SCREENSHOTS")
        if folder:
            self.browser.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.mark.slow
def test_a_conversation_in_a_browser(served: ServedModel, browser: Any) -> None:
    """By keyboard only: Enter sends, Shift+Enter does not, Escape stops, Tab reaches the buttons."""
    from selenium.webdriver.common.keys import Keys

    def answer(request: Request) -> list[int]:
        text = SAID if len(engine.requests) == 1 else "and so on " * 100
        return [*served.tokenizer.encode(text), served.eod_id or 0]

    engine = FakeEngine(answer, step_seconds=0.01)
    with listening(replace(served, positions=4096, name="tiny chat"), engine) as running:
        chat = Chat(browser, running)
        chat.wait(lambda: chat.find("#model").text == "tiny chat")
        chat.picture("empty")
        chat.write("line one", Keys.SHIFT, Keys.ENTER, Keys.NULL, "line <two>", Keys.ENTER)
        chat.wait(lambda: not chat.is_done() or len(chat.texts(".assistant .text")) == 1)
        chat.wait(chat.is_done)
        assert chat.texts(".user .text") == ["line one\nline <two>"]
        assert chat.texts(".assistant .text") == [SAID]  # as text, nothing of it is markup
        assert chat.browser.title == "tiny chat – chat" and not chat.texts("#log img, #log b")
        chat.picture("answered")
        chat.write("more", Keys.ENTER)
        chat.wait(lambda: len(chat.texts(".assistant .text")[-1]) > 60)
        chat.picture("streaming")
        chat.write(Keys.ESCAPE)
        chat.wait(chat.is_done)
        chat.wait(lambda: len(engine.cancelled) == 1)
        stopped = chat.texts(".assistant .text")[-1]
        prompt = served.tokenizer.decode(engine.requests[-1].prompt)
        assert prompt.index("line <two>") < prompt.index("not</b>") < prompt.index("more")  # it knows what was said
        chat.write("third", Keys.ENTER)
        chat.wait(lambda: len(engine.requests) == 3)
        assert stopped.strip() in served.tokenizer.decode(engine.requests[-1].prompt)
        chat.find("#stop").click()
        chat.wait(chat.is_done)
        chat.find("#new").send_keys(Keys.ENTER)
        chat.wait(lambda: chat.texts(".message") == [] and chat.find("#welcome").is_displayed())
        chat.write("fresh", Keys.ENTER)
        chat.wait(lambda: len(engine.requests) == 4)
        assert "line one" not in served.tokenizer.decode(engine.requests[-1].prompt)
        chat.find("#stop").click()
        errors = [entry for entry in browser.get_log("browser") if entry["level"] == "SEVERE"]
        assert errors == []  # among them would be what the policy forbids


@pytest.mark.slow
def test_settings_errors_and_a_small_screen(served: ServedModel, browser: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    engine = FakeEngine(lambda request: [*served.tokenizer.encode("Short."), served.eod_id or 0])
    with listening(served, engine) as running:
        phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
        chat = Chat(browser, running)
        chat.find("#open-settings").click()
        for name, value in (("#temperature", "0.5"), ("#tokens", "30"), ("#system", "Be kind.")):
            field = chat.find(name)
            field.clear()
            field.send_keys(value)
        chat.picture("settings")
        chat.find("dialog button").click()
        chat.find("#input").send_keys("Hello", Keys.ENTER)
        chat.wait(lambda: chat.texts(".assistant .text") == ["Short."])
        chat.wait(chat.is_done)
        asked = engine.requests[0]
        assert asked.sampling.temperature == 0.5 and asked.max_new_tokens == 30
        assert served.tokenizer.decode(asked.prompt).startswith("Be kind.\n")
        width = browser.execute_script("return [document.documentElement.scrollWidth, innerWidth]")
        assert width[0] <= width[1] == 360  # nothing sticks out
        chat.picture("phone")
        for _ in range(4):  # until the conversation is longer than the model
            chat.find("#input").send_keys("What else is there to be said?", Keys.ENTER)
            chat.wait(chat.is_done)
        assert chat.texts(".note") == ["The conversation is too long for the model; its beginning was left out."]
        assert len(chat.texts(".assistant .text")) == 5
        chat.find("#input").send_keys("word " * 100, Keys.ENTER)
        chat.wait(lambda: chat.texts(".note.wrong"))
        assert "but this model has 128 positions" in chat.texts(".note.wrong")[0]
        assert len(chat.texts(".message")) == 10
        assert chat.find("#input").get_attribute("value").startswith("word word")  # it can be shortened and sent again
        browser.execute_cdp_cmd(
            "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-color-scheme", "value": "dark"}]}
        )
        chat.picture("dark")
        dark = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})
        light = browser.execute_script("return getComputedStyle(document.body).backgroundColor")
        assert dark != light
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
