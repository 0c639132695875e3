"""The page in a browser: what it shows of runs that train, with pointer, keyboard and small screens."""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.web.browser import headless_chromium
from tests.trident.dashboard.listening import listening
from tests.trident.dashboard.run_folders import step, write_lines, write_run

# Names of fields in the configuration that are cut, wrapped or covered by the cell next to them.
UNREADABLE_FIELDS = """
    return [...document.querySelectorAll('tbody tr')].filter((row) => {
        const [field, value] = row.cells, words = document.createRange();
        words.selectNodeContents(field);
        const parts = [...words.getClientRects()], all = words.getBoundingClientRect();
        const next = value.getBoundingClientRect();
        const isCovered = next.top < all.bottom && next.left < all.right;
        return parts.some((part) => part.top !== all.top) || all.left < 0 || all.right > innerWidth || isCovered;
    }).map((row) => row.cells[0].textContent)"""
HOSTILE = "<img src=x onerror=\"document.title='owned'\">"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A headless Chromium."""
    with headless_chromium(tmp_path_factory.mktemp("chromium"), width=1440, height=900) as opened:
        yield opened


class Page:
    """The page as a user sees it."""

    def __init__(self, browser: Any, address: str) -> None:
        self.browser = browser
        browser.get_log("browser")
        browser.get(address)

    def find(self, selector: str) -> Any:
        """The first element of a selector."""
        return self.browser.find_element("css selector", selector)

    def texts(self, selector: str) -> list[str]:
        """What elements show."""
        return [one.text for one in self.browser.find_elements("css selector", selector)]

    def run(self, script: str) -> Any:
        """The value of a script."""
        return self.browser.execute_script(script)

    def wait(self, reached: Callable[[], Any]) -> None:
        """Waits until something is so."""
        ends_at = time.monotonic() + 120
        while not self._holds(reached):
            assert time.monotonic() < ends_at, self.find("body").text
            time.sleep(0.02)

    def open(self, view: str, reached: Callable[[], Any]) -> None:
        """Goes to a view."""
        self.find(f"#tab-{view}").click()
        self.wait(reached)
        self.picture(view)

    def resize(self, width: int) -> None:
        """Gives the screen a width: a phone's below 760 pixels."""
        size = {"width": width, "height": 740, "deviceScaleFactor": 1, "mobile": width < 760}
        self.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        self.wait(lambda: self.run("return innerWidth") == width)

    def colours(self) -> int:
        """How many pixels of the first chart have a colour of their own, not a shade of grey."""
        return int(self.run(
            "const one = document.querySelector('.plot canvas'); if (!one || !one.width) return 0;"
            "const {data} = one.getContext('2d').getImageData(0, 0, one.width, one.height); let found = 0;"
            "for (let i = 0; i < data.length; i += 4)"
            " if (data[i + 3] > 200 && Math.max(data[i], data[i + 1], data[i + 2]) -"
            " Math.min(data[i], data[i + 1], data[i + 2]) > 60) found += 1; return found"
        ))  # fmt: skip

    def errors(self) -> list[Any]:
        """What the browser complains of: among it would be what the policy forbids."""
        return [entry for entry in self.browser.get_log("browser") if entry["level"] == "SEVERE"]

    def picture(self, name: str) -> None:
        """Saves what is seen, where MEGATRON_SCREENSHOTS names a folder."""
        folder = os.environ.get("MEGATRON_SCREENSHOTS")
        if folder:
            time.sleep(0.3)
            self.browser.save_screenshot(str(Path(folder) / f"dashboard_{name}.png"))

    def _holds(self, reached: Callable[[], Any]) -> bool:
        from selenium.common.exceptions import NoSuchElementException, StaleElementReferenceException

        try:
            return bool(reached())
        except (NoSuchElementException, StaleElementReferenceException):  # drawn anew just then
            return False


def write_rich_run(folder: Path, **sections: Mapping[str, Any]) -> None:
    """A run of four ranks with everything that a page can show."""
    write_run(folder, steps=600, optim={"lr": 0.002}, **sections)
    write_lines(folder / "metrics.jsonl", [{"kind": "start", "step": 500, "at": 1.8e9, "world_size": 4}])
    write_lines(folder / "metrics.jsonl", [step(at, skipped_iterations=int(at == 520)) for at in range(501, 551)])
    write_lines(folder / "events.jsonl", [{"kind": "save", "at": 1.75e9, "iteration": 500, "text": "iter_0000500"}])
    samples = [{"prompt": "Once upon", "text": f" a time {HOSTILE}"}]
    write_lines(folder / "samples.jsonl", [{"iteration": at, "samples": samples} for at in (200, 400)])
    ranks = [
        {"rank": rank, "state": "here", "phase": "forward", "step": 551, "idle_seconds": 0.2, "heard_seconds": 1.0}
        for rank in range(4)
    ]
    (folder / "heartbeats.json").write_text(json.dumps({"axes": [["pp", 2], ["dp", 1], ["tp", 2]], "ranks": ranks}))
    (folder / "log.txt").write_text(f"hello {HOSTILE}\n" * 50)


@pytest.mark.slow
def test_curves_of_runs_that_train(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.keys import Keys

    with listening(tmp_path) as server:
        page = Page(browser, server.address)
        page.wait(lambda: "No runs yet" in page.find("#view").text and "--run-dir" in page.find("pre").text)
        write_rich_run(tmp_path / "large rate")
        plain = write_run(tmp_path / "small rate", steps=300)
        server.board.search()
        page.wait(lambda: len(page.texts(".run")) == 2 and page.colours() > 1000)
        assert page.texts(".chart h2") == ["Loss", "Gradient norm", "Learning rate", "Throughput"]
        assert page.texts(".run .state") == ["running", "running"]
        page.picture("curves")

        # Live: a step that is written appears, and nothing moves.
        places = "return [...document.querySelectorAll('.chart, .run')].map((one) => one.getBoundingClientRect().top)"
        before = page.run(places)
        write_lines(plain / "metrics.jsonl", [step(301, lm_loss=7.5)])
        page.wait(lambda: any("301 / 1,000 · loss 7.5" in text for text in page.texts(".figures")))
        assert sorted(page.run(places)) == sorted(before)

        # The pointer shows values on all charts at once; dragging zooms; Escape shows all again.
        above = page.find(".plot canvas + canvas")
        ActionChains(browser).move_to_element(above).perform()
        page.wait(lambda: page.find(".hover b").text.startswith("Step 2"))
        assert any("large rate" in text for text in page.texts(".hover tr"))
        page.picture("hover")
        ActionChains(browser).move_to_element_with_offset(above, -200, 0).click_and_hold().move_by_offset(
            100, 5
        ).release().perform()
        reset = page.find(".bar button")
        page.wait(reset.is_enabled)
        page.wait(lambda: page.colours() > 500)
        above.send_keys(Keys.ESCAPE)
        page.wait(lambda: not reset.is_enabled())
        above.send_keys(Keys.ARROW_RIGHT)
        page.wait(lambda: page.find(".hover b").text.startswith("Step"))

        # Choosing runs, axes and smoothing.
        coloured = page.colours()
        page.find("#none").click()
        page.wait(lambda: "No run selected" in page.find("#view").text)
        page.find("#filter").send_keys("small")
        page.wait(lambda: page.texts(".run .name") == ["small rate"])
        page.find("#all").click()
        page.wait(lambda: page.colours() not in (0, coloured) and page.find("#count").text == "1 of 2 shown")
        page.find("#filter").clear()
        page.find("#filter").send_keys(Keys.SPACE, Keys.BACKSPACE)
        page.find("#all").click()
        page.find("input[value=hours]").send_keys(Keys.SPACE)
        page.find("input[type=range]").send_keys(*[Keys.ARROW_RIGHT] * 5)
        page.wait(lambda: '"axis":"hours"' in page.run("return decodeURIComponent(location.hash)"))
        page.wait(lambda: page.colours() > 1000)
        assert page.errors() == []


@pytest.mark.slow
def test_the_other_views_of_a_run(browser: Any, tmp_path: Path) -> None:
    from selenium.webdriver.common.keys import Keys

    paths = "/data/of/everybody/a/corpus/with/a/long/name/tokens_text_document " * 5
    sections = {
        "model": {"apply_residual_connection_post_layernorm": False},
        "data": {"data_path": paths, "num_dataset_builder_threads": 1},
    }
    write_rich_run(tmp_path / "large rate", **sections)
    plain = write_run(tmp_path / "small rate", steps=300)
    with listening(tmp_path) as server:
        page = Page(browser, server.address)
        page.wait(lambda: len(page.texts(".run")) == 2 and page.colours() > 1000)
        next(one for one in browser.find_elements("css selector", ".run .name") if one.text == "large rate").click()
        page.open("samples", lambda: page.texts(".sample .text") == [f" a time {HOSTILE}".strip()])
        assert browser.title == "Runs" and page.texts(".sample h3, .who") == ["Once upon …", "large rate, step 400"]
        page.open(
            "ranks",
            lambda: (
                len(page.texts(".rank")) == 4 and page.texts(".stage h3") == ["Pipeline stage 0", "Pipeline stage 1"]
            ),
        )
        assert "forward · step 551" in page.texts(".rank")[3]
        page.open(
            "events", lambda: [text for text in page.texts("td .badge")] == ["skip", "resume", "lost", "save", "start"]
        )
        page.open("checkpoints", lambda: "This run saves no checkpoints" in page.find("#view").text)
        page.open("log", lambda: HOSTILE in page.find("pre.log").text)
        page.open("configuration", lambda: "optim.lr" in page.texts("td.field"))
        assert page.texts("tbody tr")[0].split() == ["optim.lr", "0.002", "0.001"]
        for width in (1280, 400):
            page.resize(width)
            assert page.run(UNREADABLE_FIELDS) == [], f"names of fields at {width} pixels"
            page.picture(f"configuration_{width}")
        page.browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})

        # A deleted run stays on the page; dark and small screens.
        shutil.rmtree(plain)
        page.wait(lambda: "deleted" in page.texts(".run .state"))
        page.find("#tab-configuration").send_keys(Keys.ARROW_RIGHT)
        page.wait(lambda: page.find("#tab-curves").get_attribute("aria-selected") == "true" and page.colours() > 1000)
        light = page.run("return getComputedStyle(document.body).backgroundColor")
        page.find("#theme").click()
        assert page.run("return getComputedStyle(document.body).backgroundColor") != light
        page.picture("dark")
        page.resize(360)
        assert page.run("return document.documentElement.scrollWidth") == 360
        page.picture("phone")
        browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        assert page.errors() == []
    page.wait(lambda: page.find("#connection").text == "disconnected")
