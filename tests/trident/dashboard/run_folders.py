"""Run folders as training writes them, for the tests of the dashboard."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any


def step(iteration: int, **values: Any) -> dict[str, Any]:
    """The record of one step."""
    return {
        "kind": "step",
        "iteration": iteration,
        "train_iterations": 1000,
        "consumed_tokens": iteration * 128,
        "seconds_per_iteration": 0.5,
        "learning_rate": 1e-3 / iteration,
        "lm_loss": 2.0 + 6.0 * math.exp(-iteration / 60),
        "loss_scale": None,
        "gradient_norm": 1.0 + 0.3 * math.sin(iteration),
        "skipped_iterations": 0,
        "nan_iterations": 0,
        "tokens_per_second": 256.0,
        **values,
    }


def write_lines(path: Path, records: Iterable[Mapping[str, Any]], end: str = "\n") -> None:
    """Appends records to a file of lines."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record) + "\n" for record in records).removesuffix("\n") + end)


def write_run(folder: Path, steps: int = 200, **config: Mapping[str, Any]) -> Path:
    """A run folder with a configuration, a log, and metrics of a number of steps."""
    folder.mkdir(parents=True)
    parallel = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2, "data_parallel_size": 1}
    sections = {"optim": {"lr": 1e-3}, "parallel": parallel, "saving": {"save": None}, **config}
    origins = {"optim.lr": "given"}
    (folder / "config.json").write_text(json.dumps({**sections, "provenance": origins}))
    (folder / "log.txt").write_text("first line\nlast line\n")
    start = {"kind": "start", "step": 0, "at": 1_700_000_000.0, "world_size": 4}
    evaluations = [
        {"kind": "evaluation", "iteration": at, "consumed_tokens": at * 128, "group": "valid", "lm_loss": 3.0 + 1 / at}
        for at in range(100, steps + 1, 100)
    ]
    records = [start, *map(step, range(1, steps + 1)), *evaluations]
    write_lines(folder / "metrics.jsonl", records)
    return folder
