"""Time of the dashboard to show many long runs, and its response to the pointer, in headless Chromium.

    python benchmarks/dashboard.py --runs 100 --steps 100000

Writes runs with the records that training writes (48 MB each for 100,000 steps), starts tools/dashboard.py on them, and
prints one JSON line per figure. Needs chromium, chromedriver and selenium. A frame of pointing draws what follows the
pointer on all charts; a frame of zooming draws all curves of all charts anew.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.errors import ConfigError

ROOT = Path(__file__).resolve().parent.parent
_DIFFERENT_RUNS = 4
_FRAMES = 120
_MOST_SECONDS = 900.0

# Moves or zooms once a frame and returns the milliseconds between frames.
_FRAMES_SCRIPT = """
const [isZoom, count, done] = arguments;
const canvas = document.querySelectorAll(".plot canvas")[1];
const box = canvas.getBoundingClientRect();
const times = [];
const tick = (now) => {
  times.push(now);
  if (times.length > count) { done(times.slice(1).map((time, place) => time - times[place])); return; }
  const clientX = box.left + 80 + (box.width - 120) * (times.length / count), clientY = box.top + box.height / 2;
  const options = {clientX, clientY, bubbles: true, cancelable: true, deltaY: times.length % 2 ? -20 : 20};
  if (isZoom) canvas.dispatchEvent(new WheelEvent("wheel", {...options, ctrlKey: true}));
  else canvas.dispatchEvent(new PointerEvent("pointermove", options));
  requestAnimationFrame(tick);
};
requestAnimationFrame(tick);
"""
_COLOURED_SCRIPT = """
const one = document.querySelector(".plot canvas");
if (!one || !one.width) return false;
const {data} = one.getContext("2d").getImageData(0, 0, one.width, one.height);
for (let i = 0; i < data.length; i += 4) if (data[i + 3] > 200 && Math.abs(data[i] - data[i + 2]) > 60) return true;
return false;
"""


@dataclass(frozen=True)
class DashboardBenchmarkFlags(ConfigSection):
    """Flags of this program."""

    runs: int = flag(100, "runs that are shown", at_least=1)
    steps: int = flag(100_000, "steps of each run", at_least=10)
    screenshot: str | None = flag(None, "where to save what was seen")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures and prints the figures."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(DashboardBenchmarkFlags, words, prog="dashboard.py", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as closing:
        folder = Path(name)
        write_runs(folder / "runs", flags.runs, flags.steps)
        browser = closing.enter_context(open_browser(folder / "browser"))
        started_at = time.monotonic()
        server, address = closing.enter_context(serving(folder / "runs"))
        show("server_listens", time.monotonic() - started_at, "s", flags)
        began_at = time.monotonic()
        browser.get(address)
        wait(lambda: browser.execute_script(_COLOURED_SCRIPT))
        show("first_curves", time.monotonic() - began_at, "s", flags)
        wait(lambda: all(run["reading"] == 1.0 and run["points"] == flags.steps for run in runs_at(address)), 1.0)
        show("all_read", time.monotonic() - started_at, "s", flags)
        show("memory_of_server", resident_megabytes(server.pid), "MB", flags)
        began_at = time.monotonic()
        browser.get(address)
        wait(lambda: browser.execute_script(_COLOURED_SCRIPT))
        show("first_curves_when_all_is_read", time.monotonic() - began_at, "s", flags)
        time.sleep(5.0)  # for all charts
        for figure, is_zoom in (("frame_of_pointing", False), ("frame_of_zooming", True)):
            used_seconds = processor_seconds(browser.service.process.pid)
            frames = sorted(browser.execute_async_script(_FRAMES_SCRIPT, is_zoom, _FRAMES))
            used_seconds = processor_seconds(browser.service.process.pid) - used_seconds
            show(f"{figure}_processor_time_of_browser", 1000 * used_seconds / _FRAMES, "ms", flags)
            more = {"percentile_95": round(frames[int(0.95 * len(frames))], 1), "worst": round(frames[-1], 1)}
            show(figure, statistics.median(frames), "ms", flags, **more)
        if flags.screenshot:
            time.sleep(3.0)
            browser.save_screenshot(flags.screenshot)
    return 0


def show(figure: str, value: float, unit: str, flags: DashboardBenchmarkFlags, **more: object) -> None:
    """Prints a figure with the sizes it belongs to."""
    print_figure("dashboard", figure, value, unit, runs=flags.runs, steps=flags.steps, **more)


def write_runs(folder: Path, runs: int, steps: int) -> None:
    """Writes runs; a few are computed, the others have the same records."""
    contents = [_metrics(number, steps) for number in range(min(runs, _DIFFERENT_RUNS))]
    for number in range(runs):
        place = folder / f"run-{number:03d}"
        place.mkdir(parents=True)
        (place / "config.json").write_text(json.dumps({"optim": {"lr": 1e-4 * (number + 1)}, "provenance": {}}))
        (place / "log.txt").write_text("")
        (place / "metrics.jsonl").write_bytes(contents[number % len(contents)])


def _metrics(seed: int, steps: int) -> bytes:
    drawn = random.Random(seed)
    lines = [json.dumps({"kind": "start", "step": 0, "at": time.time(), "world_size": 8})]
    for step in range(1, steps + 1):
        tokens_per_second = 50_000 + drawn.gauss(0, 900)
        record = {
            "kind": "step",
            "iteration": step,
            "train_iterations": steps,
            "consumed_samples": 256 * step,
            "consumed_tokens": 262_144 * step,
            "seconds_per_iteration": 262_144 / tokens_per_second,
            "learning_rate": (1 + seed) * 1e-4 * (0.55 + 0.45 * math.cos(math.pi * step / steps)),
            "global_batch_size": 256,
            "lm_loss": 2.2 + 0.1 * seed + 8 * (1 + step / 200) ** -0.5 + drawn.gauss(0, 0.05),
            "loss_scale": None,
            "gradient_norm": 0.4 + math.exp(drawn.gauss(-2, 0.5)),
            "skipped_iterations": 0,
            "nan_iterations": 0,
            "samples_per_second": tokens_per_second / 1024,
            "tokens_per_second": tokens_per_second,
            "teraflops_per_device": tokens_per_second / 400,
            "gigaflops_without_embeddings": 1.5e6 * step,
            "source_losses": None,
            "z_loss": None,
            "routing": None,
        }
        lines.append(json.dumps(record, separators=(",", ":")))
    return ("\n".join(lines) + "\n").encode()


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Starts the dashboard; yields its process and address."""
    command = [sys.executable, ROOT / "tools/dashboard.py", folder, "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        line = process.stdout.readline() if process.stdout else ""
        yield process, line.partition(": ")[2].split(" ")[0]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(30)


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[Any]:
    """A headless Chromium with a window of 1440 x 900.

    Raises:
        ConfigError: a part of it is not installed.
    """
    try:
        from selenium import webdriver
    except ImportError as failure:
        raise ConfigError("this needs the package selenium: pip install selenium") from failure
    binary, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if binary is None or driver is None:
        raise ConfigError("this needs chromium and chromedriver, for example: apt-get install chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = binary
    for word in (
        "--headless=new",
        "--no-sandbox",
        "--disable-dev-shm-usage",
        "--disable-gpu",
        "--window-size=1440,900",
    ):
        options.add_argument(word)
    options.add_argument(f"--user-data-dir={profile}")
    opened = webdriver.Chrome(options, webdriver.ChromeService(driver, env={**os.environ, "HOME": str(profile)}))
    opened.set_script_timeout(_MOST_SECONDS)
    try:
        yield opened
    finally:
        opened.quit()


def runs_at(address: str) -> list[dict[str, Any]]:
    """The server's list of runs."""
    with urllib.request.urlopen(f"{address}/api/runs", timeout=60) as answer:
        found: list[dict[str, Any]] = json.load(answer)["runs"]
    return found


def wait(reached: Any, pause_seconds: float = 0.05) -> None:
    """Waits until a condition holds, checking it after each pause.

    Raises:
        TimeoutError: it never was.
    """
    until = time.monotonic() + _MOST_SECONDS
    while not reached():
        if time.monotonic() > until:
            raise TimeoutError("the page did not show what it should")
        time.sleep(pause_seconds)


def processor_seconds(process_id: int) -> float:
    """Processor time of a process and of those below it that are running: little of it depends on what else runs."""
    parents, ticks = {}, {}
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            fields = (place / "stat").read_text().rpartition(")")[2].split()
            parents[int(place.name)], ticks[int(place.name)] = int(fields[1]), int(fields[11]) + int(fields[12])
    family = {process_id}
    while more := {child for child, parent in parents.items() if parent in family} - family:
        family |= more
    return sum(ticks.get(member, 0) for member in family) / os.sysconf("SC_CLK_TCK")


def resident_megabytes(process_id: int) -> float:
    """Memory that a process takes."""
    pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


if __name__ == "__main__":
    process_exit.exit_with(main)
