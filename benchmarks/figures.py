"""What the benchmarks share: the form of a figure, and the small model and data that quickstart trains."""

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
    """Prints one figure as a JSON line; `spread` is the smallest and the largest measurement."""
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
    """Prepares the data of examples/quickstart.sh in a folder; its output goes to standard error."""
    demo = Demo(DemoFlags(), folder / "data", folder)
    demo.data.mkdir()
    for command in demo.data_commands():
        subprocess.run(command, check=True, stdout=sys.stderr)
    return demo
