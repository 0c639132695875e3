"""Shared by the benchmarks: the output format of a measurement, and the model and data of the quickstart."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from examples.kill_and_resume import Demo, DemoFlags


def print_figure(
    benchmark: str, figure: str, value: float, unit: str, *, spread: tuple[float, float] | None = None, **more: object
) -> None:
    """Prints a measurement as a JSON line; `spread` is the minimum and maximum over repetitions."""
    record: dict[str, object] = {
        "benchmark": benchmark,
        "figure": figure,
        "value": round(value, 4),
        "unit": unit,
        **({"spread": [round(number, 4) for number in spread]} if spread else {}),
        **more,
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
    }
    print(json.dumps(record), flush=True)


def quickstart_data(folder: Path) -> Demo:
    """Prepares the data of examples/quickstart.sh in a folder, with all output on standard error."""
    demo = Demo(DemoFlags(), folder / "data", folder)
    demo.data.mkdir()
    for command in demo.data_commands():
        subprocess.run(command, check=True, stdout=sys.stderr)
    return demo
