"""Host cost of a pipeline: this project's executor compared with DeepSpeed's pipeline engine.

    torchrun --nproc-per-node 2 benchmarks/pipeline_host_cost.py

Both run 1F1B on the same network, so small that nothing else counts, in turns in the same processes. Prints one JSON
line per figure from the first rank: the processor time that a step and an evaluation take, of the rank that takes most,
and the ratio of the two engines in the same round. `--profile 20` shows in which functions the time of our steps goes.
"""

from __future__ import annotations

import cProfile
import itertools
import pstats
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import torch

from benchmarks.figures import print_figure
from megatron import device, process_exit
from megatron.config import ConfigSection, Machine, RunConfig, TokenizerFacts, flag, parse, parse_flags, resolve
from megatron.config.sections.parallel import ParallelRequest
from megatron.config.sections.pipelines import DEEPSPEED, OWN
from megatron.data.loader import Batch
from megatron.engine.engine import Engine
from megatron.parallel.joining import close_mesh, count_ranks, open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max
from megatron.train.start_up.engine_opening import build_engine

_TOKENS, _VOCABULARY = 16, 128
_DTYPES: Mapping[str, Sequence[str]] = {"fp32": (), "bf16": ("--bf16",)}


@dataclass(frozen=True)
class HostFlags(ConfigSection):
    """Flags of this program."""

    rounds: int = flag(15, "rounds of each engine", at_least=2)
    steps: int = flag(4, "steps per round", at_least=1)
    layers: int = flag(4, "blocks of the network", at_least=2)
    hidden_size: int = flag(8, "width of the network", at_least=8)
    dtypes: tuple[str, ...] = flag(tuple(_DTYPES), "precisions", nargs="+", choices=tuple(_DTYPES))
    micro_batches: tuple[int, ...] = flag((1, 8), "numbers of micro-batches per step", nargs="+")
    profile: int = flag(0, "steps of ours whose functions are shown, instead of measuring")


def main(argv: Sequence[str] | None = None) -> int:
    """Measures every combination and prints the figures."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(HostFlags, words, prog="pipeline_host_cost.py", description=__doc__ or "")
    device.choose_accelerator()
    torch.set_num_threads(1)
    mesh: ParallelMesh | None = None
    for dtype, micro_batches in itertools.product(flags.dtypes, flags.micro_batches):
        configs = {name: run_config(flags, dtype, micro_batches, name) for name in (OWN, DEEPSPEED)}
        mesh = mesh or open_mesh(configs[OWN].parallel)
        engines = {name: build_engine(config, mesh) for name, config in configs.items()}
        batches = batches_of(micro_batches)
        if flags.profile:
            show_profile(engines[OWN], batches, flags.profile)
            continue
        for figure, work in works(batches).items():
            seconds = in_turns(flags, engines, work)
            ratios = [own / other for own, other in zip(seconds[OWN], seconds[DEEPSPEED], strict=True)]
            if mesh.world.rank == 0:
                more = {"dtype": dtype, "micro_batches": micro_batches, "layers": flags.layers}
                for name, times in seconds.items():
                    print_figure(
                        "pipeline_host_cost", f"{name}_{figure}", 1000 * statistics.median(times), "ms", **more
                    )
                spread = (min(ratios), max(ratios))
                ratio = statistics.median(ratios)
                print_figure("pipeline_host_cost", f"ratio_{figure}", ratio, "DeepSpeed's", spread=spread, **more)
    if mesh is not None:
        close_mesh(mesh)
    return 0


def run_config(flags: HostFlags, dtype: str, micro_batches: int, engine: str) -> RunConfig:
    """A tiny network on a pipeline of all ranks."""
    ranks = count_ranks(ParallelRequest())
    words = [
        *("--num-layers", str(flags.layers), "--hidden-size", str(flags.hidden_size), "--num-attention-heads", "1"),
        *("--seq-length", str(_TOKENS), "--max-position-embeddings", str(_TOKENS), "--micro-batch-size", "1"),
        *("--global-batch-size", str(micro_batches), "--train-iters", "1000", "--lr", "1e-4"),
        *("--data-path", "none", "--vocab-file", "none", "--merge-file", "none"),
        *("--pipeline-model-parallel-size", str(ranks), "--pipeline-engine", engine),
        *_DTYPES[dtype],
    ]
    machine = Machine(device_type="cpu", world_size=ranks, supports_fp16=False, supports_bf16=True)
    return resolve(parse(words), machine, TokenizerFacts(vocab_size=_VOCABULARY, eod_id=0, fingerprint="none"))


def batches_of(micro_batches: int) -> list[Batch]:
    """Random tokens, one sample a micro-batch."""
    drawn = np.random.default_rng(0).integers(0, _VOCABULARY, (micro_batches, 1, _TOKENS + 1))
    mask = np.ones((1, _TOKENS), dtype=np.float32)
    return [
        Batch(row[:, :-1].copy(), row[:, 1:].copy(), mask, np.array([place]), None) for place, row in enumerate(drawn)
    ]


def works(batches: Sequence[Batch]) -> dict[str, Callable[[Engine], object]]:
    """The measurements, by figure."""
    return {
        "step": lambda engine: engine.train_batch(batches, 1e-4),
        "evaluation": lambda engine: engine.evaluate(batches),
    }


def in_turns(
    flags: HostFlags, engines: Mapping[str, Engine], work: Callable[[Engine], object]
) -> dict[str, list[float]]:
    """Processor seconds of each round, of the rank that takes most; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in engines}
    for turn in range(flags.rounds + 1):
        for name, engine in list(engines.items())[:: 1 if turn % 2 else -1]:
            began_at = time.process_time()
            for _ in range(flags.steps):
                work(engine)
            spent = torch.tensor([(time.process_time() - began_at) / flags.steps], dtype=torch.float64)
            if turn:
                seconds[name].append(float(all_reduce_max(spent, engine.mesh.world)))
    return seconds


def show_profile(engine: Engine, batches: Sequence[Batch], count: int) -> None:
    """Prints the functions in which the time of some steps goes on the first rank."""
    engine.train_batch(batches, 1e-4)
    profile = cProfile.Profile()
    profile.enable()
    for _ in range(count):
        engine.train_batch(batches, 1e-4)
    profile.disable()
    if engine.mesh.world.rank == 0:
        for order in ("tottime", "cumulative"):
            pstats.Stats(profile).sort_stats(order).print_stats(50)


if __name__ == "__main__":
    process_exit.exit_with(main)
