"""Time of blocks whose tokens are divided over ranks, in a ring or by Ulysses, and of one process with as many cores.

    torchrun --nproc-per-node 2 benchmarks/long_sequences.py --forms whole p2p a2a --repetitions 5

Prints one JSON line per form: forward and backward of all blocks, the median of the slowest rank's time. The forms take
turns in the same processes. Where tokens are divided every rank has one thread; `whole` is the first rank alone, with
a thread for each rank, while the others wait. benchmarks/sequence_memory.py measures the memory.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, Machine, TokenizerFacts, flag, parse, parse_flags, resolve
from megatron.model.interface.network import LayerKind, LayerStack
from megatron.model.networks import network_layers
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max
from megatron.train.objectives import step_settings

WHOLE = "whole"
FORMS = (WHOLE, "p2p", "a2a")


@dataclass(frozen=True)
class LongSequencesFlags(ConfigSection):
    """Flags of this program."""

    forms: tuple[str, ...] = flag(FORMS, "what is compared", nargs="+", choices=FORMS)
    length: int = flag(32768, "tokens of the sample", at_least=2)
    width: int = flag(64, "width of the blocks", at_least=1)
    heads: int = flag(4, "attention heads", at_least=1)
    layers: int = flag(1, "transformer blocks", at_least=1)
    repetitions: int = flag(1, "runs of each form; the median counts", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Measures on all ranks."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(LongSequencesFlags, words, prog="long_sequences.py", description=__doc__ or "")
    runs = {form: _run_of(flags, form) for form in flags.forms}
    seconds: dict[str, list[float]] = {form: [] for form in runs}
    for _, run in runs.values():
        run(64)  # what libraries allocate once
    for _ in range(flags.repetitions):
        for form, (mesh, run) in runs.items():
            started_at = time.perf_counter()
            run(flags.length)
            elapsed = torch.tensor([time.perf_counter() - started_at], dtype=torch.float64)
            seconds[form].append(float(all_reduce_max(elapsed, mesh.control)))  # for which all ranks wait
    for form, (mesh, _) in runs.items():
        settings = {"ranks": mesh.world.size, "form": form, "length": flags.length, "layers": flags.layers}
        settings |= {"width": flags.width, "heads": flags.heads}
        if mesh.world.rank == 0:
            per_token = [value / flags.length * 1e6 for value in sorted(seconds[form])]
            spread = (per_token[0], per_token[-1])
            print_figure(
                "long_sequences", "time_per_token", statistics.median(per_token), "us", spread=spread, **settings
            )
    return 0


def _run_of(flags: LongSequencesFlags, form: str) -> tuple[ParallelMesh, Callable[[int], None]]:
    """The mesh of a form, and forward and backward of its blocks with a sample of some tokens."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    pairs = {
        "--num-layers": flags.layers, "--hidden-size": flags.width, "--num-attention-heads": flags.heads,
        "--seq-length": flags.length, "--max-position-embeddings": flags.length, "--position-embedding-type": "rope",
        "--attention-dropout": 0, "--hidden-dropout": 0, "--micro-batch-size": 1, "--train-iters": 1, "--lr": 1,
        **({} if form == WHOLE else {"--context-parallel-size": world_size, "--cp-comm-type": form}),
        "--data-path": "none", "--vocab-file": "none", "--merge-file": "none",
    }  # fmt: skip
    machine = Machine(device_type="cpu", world_size=world_size, supports_fp16=False, supports_bf16=True)
    request = parse([str(word) for pair in pairs.items() for word in pair])
    config = resolve(request, machine, TokenizerFacts(vocab_size=64, eod_id=0, fingerprint="none"))
    mesh = open_mesh(config.parallel)
    specs = [spec for spec in network_layers(config.model, mesh) if spec.kind is LayerKind.BLOCK]
    blocks, settings = LayerStack(specs, seed=1), step_settings(config, mesh)

    def run(tokens: int) -> None:
        if form == WHOLE and mesh.world.rank > 0:
            return
        torch.set_num_threads(world_size if form == WHOLE else 1)
        share = 1 if form == WHOLE else world_size
        hidden = torch.randn(1, tokens // share, flags.width, requires_grad=True)
        output = blocks(hidden, settings.context(torch.zeros(1, dtype=torch.int64)))
        output.backward(torch.ones_like(output))
        blocks.zero_grad()

    return mesh, run


if __name__ == "__main__":
    process_exit.exit_with(main)
