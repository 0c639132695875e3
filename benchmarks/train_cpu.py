"""Tokens per second of one process, compared with the same model in plain PyTorch, alternating within one run.

    python benchmarks/train_cpu.py

Prints one JSON line per measurement. Both train the model of examples/quickstart.sh (dropout 0, fp32, AdamW, clipping)
with the same number of threads. Ours is the whole step: reading the batch, DeepSpeed, the loss of the step. The plain
loop is optimized: fused attention, fused AdamW, one matrix product for query, key and value.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure, quickstart_data
from megatron import log
from megatron.config import ConfigSection, RunRequest, flag, parse, parse_flags

if TYPE_CHECKING:
    from benchmarks.plain_gpt import PlainTraining
    from megatron.train.build import Run


@dataclass(frozen=True)
class TrainFlags(ConfigSection):
    """Flags of this program."""

    rounds: int = flag(8, "rounds of each", at_least=2)
    steps: int = flag(3, "steps per round", at_least=1)
    micro_batch_size: int = flag(8, "samples per forward pass, of a global batch of 8", at_least=1, at_most=8)
    threads: int = flag(1, "threads of each process", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains both alternately and prints the measurements."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(TrainFlags, words, prog="train_cpu.py", description=__doc__ or "")
    os.environ.update(OMP_NUM_THREADS=str(flags.threads), DS_ACCELERATOR="cpu")

    import torch

    from benchmarks.plain_gpt import PlainTraining
    from megatron.train.build import open_run

    torch.set_num_threads(flags.threads)
    with tempfile.TemporaryDirectory() as name:
        config = training_config(Path(name), flags)
        with open_run(config) as run:
            if run is None:
                return 1
            plain = PlainTraining(run.config.model, run.config.optim)
            rates = in_turns(flags, run, plain)
    tokens = run.config.optim.global_batch_size * run.config.data.seq_length
    settings = {"tokens_per_step": tokens, "micro_batch_size": flags.micro_batch_size, "threads": flags.threads}
    for name, found in rates.items():
        spread = (min(found), max(found))
        print_figure(
            "train_cpu", f"{name}_tokens_per_second", statistics.median(found), "tokens/s", spread=spread, **settings
        )
    ratios = [ours / theirs for ours, theirs in zip(rates["ours"], rates["plain"], strict=True)]
    print_figure(
        "train_cpu", "ratio_to_plain", statistics.median(ratios), "ratio", spread=(min(ratios), max(ratios)), **settings
    )
    return 0


def training_config(folder: Path, flags: TrainFlags) -> RunRequest:
    """The model and data of quickstart, without dropout and without saving."""
    demo = quickstart_data(folder)
    words = [str(word) for word in demo.training_flags("run")]
    for option in ("--save", "--load", "--save-interval"):
        position = words.index(option)
        del words[position : position + 2]
    return parse(
        [*words, "--hidden-dropout", "0", "--micro-batch-size", str(flags.micro_batch_size), "--train-iters", "100000"]
    )


def in_turns(flags: TrainFlags, run: Run, plain: PlainTraining) -> dict[str, list[float]]:
    """Tokens per second of every round; the first round of each is a warm-up and is not counted."""
    from megatron.config.schedule import learning_rate

    def ours() -> None:
        rate = learning_rate(run.config.optim, run.progress.consumed_samples)
        step = run.engine.train_batch(run.train_batches(), rate)
        run.progress = run.progress.after(
            step.sample_count, step.sample_count * run.config.data.seq_length, step.skipped
        )

    batches = [list(run.train_batches())]

    def theirs() -> None:
        plain.step(batches[0], 1e-3)

    rates: dict[str, list[float]] = {"ours": [], "plain": []}
    for turn in range(flags.rounds + 1):
        for name, step in (("ours", ours), ("plain", theirs)) if turn % 2 else (("plain", theirs), ("ours", ours)):
            rate = timed(step, flags.steps, run)
            if turn:
                rates[name].append(rate)
    return rates


def timed(step: Callable[[], Any], steps: int, run: Run) -> float:
    """Tokens per second over `steps` steps."""
    started_at = time.perf_counter()
    for _ in range(steps):
        step()
    seconds = time.perf_counter() - started_at
    return steps * run.config.optim.global_batch_size * run.config.data.seq_length / seconds


if __name__ == "__main__":
    log.exit_with(main)
