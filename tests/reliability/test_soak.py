"""A long run takes no more memory, descriptors, threads or disk at its end than at a fifth of its way.

The suite trains some hundred steps; `--cases 20000` trains that many, and the figures are in benchmarks/RESULTS.md.
"""

from __future__ import annotations

import gc
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import pretrain_gpt
from megatron.observe.report import Report
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import DEFAULT_CASES
from tests.helpers.tiny_run import write_tiny_corpus

STEPS, GROWTH = 240, 1.02
SLACK_BYTES = (
    4 << 20
)  # pages that the allocator keeps or gives back; a leak of a thousandth of a step's tensors is more


def resources(checkpoints: Path) -> dict[str, int]:
    """What this process and its checkpoints take now; logs and metrics grow with the steps and are not counted."""
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


def test_a_run_takes_no_more_at_its_end_than_at_a_fifth_of_its_way(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    cases = request.config.getoption("--cases")
    steps = STEPS if cases <= DEFAULT_CASES else cases
    flags = write_tiny_corpus(tmp_path).flags(
        *("--async-save", "--keep-last", "2", "--no-progress-bar"),
        folder=tmp_path / "run",
        train_iters=steps,
        save_interval=6,
        eval_interval=9,
        log_interval=10,
    )
    (seen,) = run_ranks(trained, 1, flags, steps, tmp_path / "run" / "checkpoints", timeout_seconds=60 + steps)
    least = {name: {key: min(one[key] for one in found) for key in found[0]} for name, found in seen.items()}
    print(json.dumps({"steps": steps, **least}))
    for key, before in least["a fifth"].items():
        assert least["the end"][key] <= before * GROWTH + (SLACK_BYTES if key == "memory" else 0), (key, least)
