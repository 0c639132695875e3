"""Trains for many steps: memory, descriptors, threads and disk must not grow after a fifth of the run.

python -m campaigns.run soak --cases 20000        the number of steps
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pretrain_gpt
from campaigns.campaign import Plan, Result
from megatron.observe.report import Report
from tests.helpers.ranks import run_ranks
from tests.helpers.tiny_run import write_tiny_corpus

GROWTH = 1.02
SLACK_BYTES = 4 << 20  # pages that the allocator keeps; a leak of a thousandth of a step's tensors is more


def resources(checkpoints: Path) -> dict[str, int]:
    """The resources of this process and its checkpoints; logs and metrics grow with the steps and are not counted."""
    gc.collect()
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return {
        "memory": int(status["VmRSS"].split()[0]) * 1024,
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": int(status["Threads"]),
        "disk": size_bytes(checkpoints),
    }


def size_bytes(checkpoints: Path) -> int:
    """The bytes of all checkpoints, once none is removed while they are counted."""
    while True:
        with suppress(FileNotFoundError):
            return sum(path.stat().st_size for path in checkpoints.glob("iter_*/*"))


def trained(rank: int, flags: list[str], steps: int, checkpoints: Path) -> dict[str, list[dict[str, int]]]:
    """Trains, and looks at a fifth of the way and at the end, ten steps in a row each."""
    seen: dict[str, list[dict[str, int]]] = {"a fifth": [], "the end": []}
    report_step = Report.step

    def step(self: Report, progress: Any, *arguments: Any, **options: Any) -> None:
        report_step(self, progress, *arguments, **options)
        for name, last in (("a fifth", steps // 5), ("the end", steps - 1)):
            if last - 10 < progress.step <= last:
                seen[name].append(resources(checkpoints))

    Report.step = step  # type: ignore[method-assign]
    assert pretrain_gpt.train(flags) == 0
    return seen


def run_cases(plan: Plan) -> Iterator[Result]:
    """Trains one run with as many steps as the plan has cases."""
    steps = max(plan.cases, 100)
    flags = write_tiny_corpus(plan.folder).flags(
        *("--async-save", "--keep-last", "2", "--no-progress-bar"),
        folder=plan.folder / "run",
        train_iters=steps,
        save_interval=6,
        eval_interval=9,
        log_interval=10,
    )
    (seen,) = run_ranks(trained, 1, flags, steps, plan.folder / "run" / "checkpoints", timeout_seconds=120 + steps)
    least = {name: {key: min(one[key] for one in found) for key in found[0]} for name, found in seen.items()}
    for number, (key, before) in enumerate(least["a fifth"].items()):
        after = least["the end"][key]
        grew = after > before * GROWTH + (SLACK_BYTES if key == "memory" else 0)
        yield Result(number, key, "steady", f"{json.dumps(least)} after {steps} steps" if grew else "")
