"""Tokens per processor second of one process, compared with plain PyTorch and transformers, in turns.

    python benchmarks/train_cpu.py

Prints one JSON line per measurement, for GPT-2 and for Llama, in fp32 and in bf16, without dropout and with 0.1 of both
kinds, hidden and attention. All train a network of the size of examples/quickstart.sh (AdamW, clipping; bf16 with
float32 copies of the weights) with the same number of threads, one after another in the same process. Ours is the whole
step: reading the batch, DeepSpeed, the loss of the step; `--kernels` is handed to it. The plain loop is optimized:
fused attention, fused AdamW, one matrix product for query, key and value. transformers runs in the same loop, with its
default attention and with its explicit one (`eager`). The others have torch's dropout in the places where ours is.
Seconds are those of the processor, since on a shared machine wall time measures the others' load. `the_fastest` is the
fastest of the others in the same round. `--profile 3` shows what takes the time of three steps instead.
"""

from __future__ import annotations

import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.figures import print_figure, quickstart_data
from examples.kill_and_resume import Demo, DemoFlags
from megatron import process_exit
from megatron.config import ConfigSection, RunRequest, flag, parse, parse_flags

if TYPE_CHECKING:
    from megatron.train.run import Run

LLAMA = [
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--num-query-groups", "2"),
    *("--activation-function", "silu", "--gated-linear-unit", "--ffn-hidden-size", "704", "--no-add-bias-linear"),
    "--untie-embeddings-and-output-weights",
]


@dataclass(frozen=True)
class TrainFlags(ConfigSection):
    """Flags of this program."""

    rounds: int = flag(8, "rounds of each", at_least=2)
    steps: int = flag(3, "steps per round", at_least=1)
    micro_batch_size: int = flag(8, "samples per forward pass, of a global batch of 8", at_least=1, at_most=8)
    threads: int = flag(1, "threads of each process", at_least=1)
    architecture: str = flag("all", "the network", choices=("all", "gpt2", "llama"))
    dtype: str = flag("all", "precision", choices=("all", "fp32", "bf16"))
    dropout: str = flag("all", "hidden and attention dropout", choices=("all", "0", "0.1"))
    kernels: str | None = flag(None, "implementations of operations in our step, as pretrain_gpt.py takes them")
    profile: int = flag(0, "steps of ours and of the plain loop whose operations are shown, instead of measuring")
    work_dir: str | None = flag(None, "folder with the data of an earlier run of this program, or for it")


def main(argv: Sequence[str] | None = None) -> int:
    """Trains all of them alternately and prints the measurements."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(TrainFlags, words, prog="train_cpu.py", description=__doc__ or "")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(flags.work_dir or name)
        if not (folder / "data").is_dir():
            quickstart_data(folder)
        demo = Demo(DemoFlags(), folder / "data", Path(name) / "runs")
        chosen = (flags.architecture, flags.dtype, flags.dropout)
        if "all" not in chosen:
            return measure(demo, flags)
        every = (("gpt2", "llama"), ("fp32", "bf16"), ("0", "0.1"))
        rows = [options if choice == "all" else (choice,) for choice, options in zip(chosen, every, strict=True)]
        for architecture, dtype, dropout in itertools.product(*rows):
            choice = ["--architecture", architecture, "--dtype", dtype, "--dropout", dropout, "--work-dir", str(folder)]
            subprocess.run([sys.executable, __file__, *words, *choice], check=True)
    return 0


def measure(demo: Demo, flags: TrainFlags) -> int:
    """The measurements of one architecture in one precision."""
    os.environ.update(OMP_NUM_THREADS=str(flags.threads), DS_ACCELERATOR="cpu")

    import torch

    from megatron.train.build import open_run

    torch.set_num_threads(flags.threads)
    with open_run(training_config(demo, flags)) as (run, _):
        if flags.profile:
            show_profile(flags, run)
            return 0
        rates = in_turns(flags, run)
    tokens = run.config.optim.global_batch_size * run.config.data.seq_length
    settings: dict[str, Any] = {
        "architecture": flags.architecture,
        "dtype": flags.dtype,
        "tokens_per_step": tokens,
        "micro_batch_size": flags.micro_batch_size,
        "threads": flags.threads,
        "dropout": float(flags.dropout),
        **({"kernels": flags.kernels} if flags.kernels else {}),
    }
    for name, found in rates.items():
        spread = (min(found), max(found))
        print_figure(
            "train_cpu", f"{name}_tokens_per_second", statistics.median(found), "tokens/s", spread=spread, **settings
        )
    others = {name: found for name, found in rates.items() if name != "ours"}
    fastest = [max(turn) for turn in zip(*others.values(), strict=True)]
    for name, theirs in {**others, "the_fastest": fastest}.items():
        ratios = [ours / other for ours, other in zip(rates["ours"], theirs, strict=True)]
        spread = (min(ratios), max(ratios))
        print_figure("train_cpu", f"ratio_to_{name}", statistics.median(ratios), "ratio", spread=spread, **settings)
    return 0


def training_config(demo: Demo, flags: TrainFlags) -> RunRequest:
    """The model and data of quickstart, with the requested dropout and without saving."""
    words = [str(word) for word in demo.training_flags("run")]
    for option in ("--save", "--load", "--save-interval"):
        position = words.index(option)
        del words[position : position + 2]
    words += ["--hidden-dropout", flags.dropout, "--attention-dropout", flags.dropout]
    words += ["--micro-batch-size", str(flags.micro_batch_size), "--train-iters", "100000"]
    words += ["--kernels", flags.kernels] if flags.kernels else []
    words += LLAMA if flags.architecture == "llama" else []
    return parse([*words, "--bf16"] if flags.dtype == "bf16" else words)


def in_turns(flags: TrainFlags, run: Run) -> dict[str, list[float]]:
    """Tokens per second of every round; the first round of each is a warm-up and is not counted."""
    steps = training_steps(flags, run)
    rates: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(flags.rounds + 1):
        for name, step in list(steps.items())[:: 1 if turn % 2 else -1]:
            rate = timed(step, flags.steps, run)
            if turn:
                rates[name].append(rate)
    return rates


def training_steps(flags: TrainFlags, run: Run) -> dict[str, Callable[[], Any]]:
    """A step of each of those compared."""
    import torch

    from benchmarks.plain_gpt import PlainGPT
    from benchmarks.plain_llama import PlainLlama
    from benchmarks.training_loop import TrainingLoop, TransformersNetwork
    from megatron.config.schedule import learning_rate

    def ours() -> None:
        rate = learning_rate(run.config.optim, run.progress.consumed_samples)
        step = run.engine.train_batch(run.train_batches(), rate)
        run.progress = run.progress.after(step.sample_count, step.sample_count * run.config.data.seq_length)

    model, dtype = run.config.model, torch.float32 if flags.dtype == "fp32" else torch.bfloat16
    networks = {
        "plain": PlainGPT(model) if flags.architecture == "gpt2" else PlainLlama(model),
        "transformers": TransformersNetwork(model, "sdpa"),
        "transformers_eager": TransformersNetwork(model, "eager"),
    }
    loops = {name: TrainingLoop(network, run.config.optim, dtype) for name, network in networks.items()}
    batches = list(run.train_batches())
    return {"ours": ours, **{name: (lambda loop=loop: loop.step(batches, 1e-3)) for name, loop in loops.items()}}


def show_profile(flags: TrainFlags, run: Run) -> None:
    """Prints the operations that take the most time, for ours and for the plain loop."""
    import torch

    steps = training_steps(flags, run)
    for name in ("ours", "plain"):
        steps[name]()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            for _ in range(flags.profile):
                steps[name]()
        table = profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30)
        print(f"{name}, {flags.profile} steps\n{table}", flush=True)


def timed(step: Callable[[], Any], steps: int, run: Run) -> float:
    """Tokens per second of processor time over `steps` steps."""
    started_at = time.process_time()
    for _ in range(steps):
        step()
    seconds = time.process_time() - started_at
    return steps * run.config.optim.global_batch_size * run.config.data.seq_length / seconds


if __name__ == "__main__":
    process_exit.exit_with(main)
