"""A browser without a window, for tests of pages."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@contextlib.contextmanager
def headless_chromium(profile: Path, *, width: int, height: int) -> Iterator[Any]:
    """A headless Chromium that keeps what the pages say on their console; the test is skipped where there is none.

    Args:
        profile: folder of everything that the browser writes.
        width: of the window, in pixels; height likewise.
    """
    webdriver = pytest.importorskip("selenium.webdriver")
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        pytest.skip("pages are tested in chromium, with chromedriver: they are not installed")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu"):
        options.add_argument(flag)
    options.add_argument(f"--window-size={width},{height}")
    options.add_argument(f"--user-data-dir={profile}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver, env={**os.environ, "HOME": str(profile)}))
    try:
        yield opened
    finally:
        opened.quit()
