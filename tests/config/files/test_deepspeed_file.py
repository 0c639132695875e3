"""A DeepSpeed file fills in what was not given, and only a given flag can disagree with it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime import lr_schedules

from megatron.config import Machine, RunRequest, TokenizerFacts, resolve
from megatron.config.schedule import learning_rate
from tests.config.command_lines import small


def with_file(folder: Path, tree: Any, text: str = "", drop: str = "") -> RunRequest:
    """The small command line with a DeepSpeed file."""
    file = folder / "ds.json"
    file.write_text(tree if isinstance(tree, str) else json.dumps(tree))
    return small(f"--deepspeed --deepspeed_config {file} {text}", drop)


ADAM = {"type": "AdamW", "params": {"lr": 9.0, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.3}}
DECAY = {
    "type": "WarmupDecayLR",
    "params": {
        "warmup_min_lr": 0, "warmup_max_lr": 0.5, "warmup_num_steps": 3, "total_num_steps": 9, "warmup_type": "linear",
    },
}  # fmt: skip
COSINE = {"type": "WarmupCosineLR", "params": {"total_num_steps": 9, "warmup_num_steps": 3, "warmup_type": "linear"}}


def test_the_rates_are_deepspeeds_one_step_earlier(tmp_path: Path) -> None:
    machine = Machine(device_type="cpu", world_size=1, supports_fp16=False, supports_bf16=True)
    weight = torch.nn.Parameter(torch.zeros(1))
    for scheduler in (DECAY, COSINE):
        request = with_file(tmp_path, {"optimizer": ADAM, "scheduler": scheduler}, drop="--lr")
        optim = resolve(request, machine, TokenizerFacts(100, 0, "none")).optim
        theirs = getattr(lr_schedules, scheduler["type"])(torch.optim.SGD([weight], lr=optim.lr), **scheduler["params"])
        for step in range(9):
            theirs.step()
            shift = 0 if scheduler is DECAY or step < 3 else 1  # its cosine begins one step on
            assert learning_rate(optim, 8 * (step + shift)) == pytest.approx(theirs.get_last_lr()[0], abs=1e-9), step
