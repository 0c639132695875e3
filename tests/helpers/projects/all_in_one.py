"""Configuration files of `train.py` on the dev corpus, small enough for a test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from megatron.observe.metrics_file import read_steps

MODEL = {"n_head": 4, "n_layer": 2, "n_ctx": 32, "d_model": 32, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
TRAINER = {"batch_size": 8, "lr": 1e-2, "n_workers": 0, "log_interval": 1, "attention_opt": True}


def write_config(folder: Path, dataset: str = "dev", *, model: Any = None, trainer: Any = None) -> Path:
    """A configuration file whose runs are in `logs` of the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    logs = str(folder / "logs")
    tree = {
        "dataset": dataset,
        "model": {**MODEL, **(model or {})},
        "trainer": {**TRAINER, "log_path": logs, "ckpt_path": logs, **(trainer or {})},
    }
    path = folder / "config.json"
    path.write_text(json.dumps(tree))
    return path


def losses(run: Path) -> list[float]:
    """The losses of the steps, in order."""
    return [record["lm_loss"] for _, record in sorted(read_steps(run).items())]
