"""Runs of HelloDeepSpeed's train_bert.py on a few rhyming lines."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from examples.hello_deepspeed import train_bert
from megatron.checkpoint import read_record, read_tensors

LAYERS, WIDTH, HEADS, LENGTH, BATCH = 1, 32, 2, 16, 8
TINY = (
    f"--num_layers {LAYERS} --h_dim {WIDTH} --num_heads {HEADS} --ff_dim 64 --max_seq_length {LENGTH} "
    f"--batch_size {BATCH} --log_every 1"
).split()
LEARNING_RATE = 2.0e-3
_COLORS = ["red", "blue", "green", "white", "black"]
_THINGS = ["house", "garden", "window", "door", "table", "chair"]


@dataclass(frozen=True)
class Alone:
    """Runs in one process.

    Attributes:
        long: experiment of 200 iterations.
        five: experiment of five iterations, continued to ten.
        ten: experiment of ten iterations.
        five_steps: the checkpoints of `five` before it was continued.
        output: what the long run printed.
    """

    long: Path
    five: Path
    ten: Path
    five_steps: tuple[int, ...]
    output: str


def write_text(path: Path) -> None:
    """Writes lines whose words follow from their neighbours."""
    lines = [
        f"the {first} {thing} stands near the {second} {thing} and every {thing} is {first} or {second}"
        for thing in _THINGS
        for first in _COLORS
        for second in _COLORS
    ]
    path.write_text("\n".join(lines) + "\n")


def experiments(folder: Path) -> list[Path]:
    """The experiment folders in a folder, in the order of their start."""
    return sorted(folder.glob("bert_pretrain.*"))


def steps(experiment: Path) -> tuple[int, ...]:
    """The steps of an experiment's checkpoints."""
    return tuple(int(path.name.removeprefix("iter_")) for path in sorted((experiment / "checkpoints").glob("iter_*")))


def newest(experiment: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The record of an experiment's newest checkpoint, and its weights and moments by name."""
    path = max((experiment / "checkpoints").glob("iter_*"))
    kinds: tuple[Any, ...] = ("weight", "exp_avg", "exp_avg_sq")
    tensors = {f"{name} {kind}": values.clone() for kind in kinds for name, values in read_tensors(path, None, kind)}
    return read_record(path), tensors


def run_alone(rank: int, folder: str) -> tuple[tuple[int, ...], str]:
    """Trains in one process: 200 iterations; five, continued to ten; and ten."""
    root = Path(folder)
    common = [*TINY, "--dataset", str(root / "text.txt"), "--lr", str(LEARNING_RATE), "--checkpoint_dir"]
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        assert train_bert.main([*common, str(root / "long"), "--num_iterations", "200"]) == 0
    output = printed.getvalue()
    short = ["--checkpoint_every", "2", "--num_iterations"]
    assert train_bert.main([*common, str(root / "short"), *short, "5"]) == 0
    (five,) = experiments(root / "short")
    found = steps(five)
    more = ["--load_checkpoint_dir", str(five), "--num_iterations", "10", "--lr", str(LEARNING_RATE)]
    assert train_bert.main(more) == 0
    assert train_bert.main([*common, str(root / "ten"), *short, "10"]) == 0
    return found, output
