"""Cost of the numerical guards relative to a training step: comparing replicas, and deciding on each update.

    torchrun --nproc-per-node 2 benchmarks/replicas.py --zero-stage 0

Prints one JSON line per figure, from the first rank. Two data-parallel ranks train GPT-2 124M (unless changed), one
sample per rank and step: the shortest step there is, so a real one, with more samples, pays a smaller share.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.figures import print_figure
from megatron import device, process_exit
from megatron.config import ConfigSection, Machine, RunConfig, TokenizerFacts, flag, parse, parse_flags, resolve
from megatron.data.loader import Batch
from megatron.engine.engine import Engine
from megatron.engine.replicas import find_differences, replicas
from megatron.parallel.joining import close_mesh, count_ranks, open_mesh
from megatron.parallel.messages import all_reduce_max
from megatron.train.start_up.engine_opening import build_engine

# A check before each save, at an interval that is on the short side.
STEPS_BETWEEN_SAVES = 100


@dataclass(frozen=True)
class ReplicasFlags(ConfigSection):
    """Flags of this program."""

    num_layers: int = flag(12, "transformer layers", at_least=1)
    hidden_size: int = flag(768, "width", at_least=64)
    seq_length: int = flag(1024, "tokens per sample", at_least=1)
    tensor_model_parallel_size: int = flag(1, "tensor-parallel ranks", at_least=1)
    zero_stage: int = flag(0, "ZeRO stage", at_least=0, at_most=3)
    steps: int = flag(3, "timed steps", at_least=1)
    repeats: int = flag(5, "timed comparisons", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Trains some steps and prints the figures."""
    flags = parse_flags(
        ReplicasFlags, sys.argv[1:] if argv is None else argv, prog="replicas.py", description=__doc__ or ""
    )
    device.choose_accelerator()
    config = run_config(flags)
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    batches = random_batches(config, engine)
    step_seconds = timed(engine, flags.steps + 1, lambda: engine.train_batch(batches, 1e-4))[1:]
    check_seconds = timed(engine, flags.repeats, lambda: find_differences(engine))
    decide_seconds = timed(engine, 20, lambda: decide(engine))
    if mesh.world.rank == 0:
        compared = sum(replica.values.nbytes for _, replica in replicas(engine))
        layout = {"ranks": mesh.world.size, "tp": mesh.tp.size, "zero_stage": flags.zero_stage}
        step, check = median(step_seconds), median(check_seconds)
        show = {"step_seconds": step_seconds, "comparison_seconds": check_seconds, "decision_seconds": decide_seconds}
        for name, values in show.items():
            print_figure("replicas", name, median(values), "s", spread=(min(values), max(values)), **layout)
        print_figure("replicas", "compared", compared / 1e6, "MB per rank", **layout)
        percent = 100.0 * check / (STEPS_BETWEEN_SAVES * step)
        print_figure("replicas", "comparison_per_100_steps", percent, "% of the steps", goal=0.1, **layout)
        print_figure("replicas", "decision_per_step", 100.0 * median(decide_seconds) / step, "% of a step", **layout)
    close_mesh(mesh)
    return 0


def run_config(flags: ReplicasFlags) -> RunConfig:
    """The resolved configuration of one sample per rank and step."""
    ranks = count_ranks(parse(["--data-path", "none", *_model(flags)]).parallel)
    copies = ranks // flags.tensor_model_parallel_size
    line = [*_model(flags), "--global-batch-size", str(copies), "--data-path", "none"]
    machine = Machine(device.device_type(), ranks, device.supports_fp16(), device.supports_bf16())
    return resolve(parse(line), machine, TokenizerFacts(vocab_size=50257, eod_id=0, fingerprint="none"))


def _model(flags: ReplicasFlags) -> list[str]:
    pairs = {
        "num-layers": flags.num_layers,
        "hidden-size": flags.hidden_size,
        "num-attention-heads": max(1, flags.hidden_size // 64),
        "seq-length": flags.seq_length,
        "max-position-embeddings": flags.seq_length,
        "tensor-model-parallel-size": flags.tensor_model_parallel_size,
        "zero-stage": flags.zero_stage,
        "micro-batch-size": 1,
        "train-iters": 1,
        "lr": 1e-4,
        "hidden-dropout": 0,
        "attention-dropout": 0,
        "vocab-file": "none",
        "merge-file": "none",
    }
    return [word for name, value in pairs.items() for word in (f"--{name}", str(value))]


def random_batches(config: RunConfig, engine: Engine) -> list[Batch]:
    """One micro-batch of random tokens."""
    drawn = np.random.default_rng(engine.mesh.batch.rank).integers(50257, size=(1, config.data.seq_length + 1))
    mask = np.ones((1, config.data.seq_length), np.float32)
    ids = np.full(1, engine.mesh.batch.rank, np.int64)
    return [Batch(np.ascontiguousarray(drawn[:, :-1]), np.ascontiguousarray(drawn[:, 1:]), mask, ids, None)]


def decide(engine: Engine) -> None:
    """The part of a decision that a step without a gate does not have: one small all-reduce over all ranks."""
    values = engine.mesh.device
    engine.gate.begin(lambda: (torch.ones((), device=values), torch.ones((), device=values)))
    engine.gate._decide(is_before_update=True)


def timed(engine: Engine, repeats: int, work: Callable[[], object]) -> list[float]:
    """Seconds of each call; all ranks begin together."""
    found = []
    for _ in range(repeats):
        all_reduce_max(torch.zeros(1), engine.mesh.control)
        started_at = time.perf_counter()
        work()
        device.synchronize()
        found.append(time.perf_counter() - started_at)
    return found


if __name__ == "__main__":
    process_exit.exit_with(main)
