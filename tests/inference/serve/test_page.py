"""The chat page: its headers, and what it does in a browser without a network."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.inference.generation import Request
from megatron.inference.serve.page import read_page
from megatron.inference.serve.requests.served import Served
from tests.inference.serve.fakes import FakeEngine
from tests.inference.serve.listening import Listening, listening

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
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("the chat page is tested in chromium, with chromedriver: they are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    profile = tmp_path_factory.mktemp("chromium")
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1000,760",
    ):
        options.add_argument(flag)
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    service = webdriver.ChromeService(driver, env={**os.environ, "HOME": str(profile)})
    opened = webdriver.Chrome(options, service)
    yield opened
    opened.quit()


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
        """What elements show."""
        return [one.text for one in self.browser.find_elements("css selector", selector)]

    def write(self, *keys: str) -> None:
        """Types into what has the focus, as a user of the keyboard does."""
        self.browser.switch_to.active_element.send_keys(*keys)

    def wait(self, reached: Callable[[], Any]) -> None:
        """Waits until something is so."""
        ends_at = time.monotonic() + 60
        while not reached():
            assert time.monotonic() < ends_at, self.find("body").text
            time.sleep(0.02)

    def is_done(self) -> bool:
        """Whether no answer is being generated."""
        return bool(self.find("#send").is_displayed())

    def picture(self, name: str) -> None:
        """Saves what is seen, where MEGATRON_SCREENSHOTS names a folder."""
        folder = os.environ.get("MEGATRON_SCREENSHOTS")
        if folder:
            self.browser.save_screenshot(str(Path(folder) / f"{name}.png"))


@pytest.mark.slow
def test_a_conversation_in_a_browser(served: Served, browser: Any) -> None:
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
def test_settings_errors_and_a_small_screen(served: Served, browser: Any) -> None:
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
