"""Memory and time of attention with documents and windows on CPU: one dense mask, or only the visible blocks.

    python benchmarks/attention.py

Prints one JSON line per measurement. Each case is forward and backward of the attention of one layer, with the mask
that all layers of a micro-batch share, in a process of its own: the peak of its resident memory over that of its
inputs, and the shortest time.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.kernels.attention.bounded import plan_attention
from megatron.kernels.attention.bounds import Bounds, local_bias
from megatron.kernels.attention.dense import attention

CASES = ("documents-dense", "documents-blocks", "window-dense", "window-blocks")


@dataclass(frozen=True)
class AttentionFlags(ConfigSection):
    """Flags of this program."""

    length: int = flag(8192, "tokens of a sample", at_least=2)
    documents: int = flag(8, "documents of a sample", at_least=1)
    window: int = flag(1024, "tokens of the sliding window", at_least=1)
    heads: int = flag(8, "attention heads of width 64", at_least=1)
    micro_batch_size: int = flag(1, "samples", at_least=1)
    repetitions: int = flag(1, "runs, of which the fastest counts", at_least=1)
    dtype: str = flag("fp32", "precision", choices=("fp32", "bf16"))
    case: str = flag("all", "what restricts attention, and how it is computed", choices=("all", *CASES))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs every case in a process of its own."""
    words = list(sys.argv[1:] if argv is None else argv)
    flags = parse_flags(AttentionFlags, words, prog="attention.py", description=__doc__ or "")
    if flags.case != "all":
        measure(flags)
        return 0
    for case in CASES:
        command = [sys.executable, __file__, *words, "--case", case]
        subprocess.run(command, check=True, env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"})
    return 0


def measure(flags: AttentionFlags) -> None:
    """Prints the memory and the time of one case."""
    batch, length, heads = flags.micro_batch_size, flags.length, flags.heads
    dtype = torch.float32 if flags.dtype == "fp32" else torch.bfloat16
    fused = torch.randn(batch, length, heads, 3, 64, dtype=dtype).requires_grad_()
    kind, form = flags.case.split("-")
    bounds = Bounds(window=flags.window) if kind == "window" else Bounds(segment_ids=documents(flags))
    torch.ones(64, 64) @ torch.ones(64, 64)  # what the libraries allocate once
    before, seconds = resident_bytes(), []
    for _ in range(flags.repetitions):
        started_at = time.perf_counter()
        query, key, value = (part.transpose(1, 2) for part in fused.unbind(3))  # [b, a, s, d]
        if form == "dense":
            attended = attention(query, key, value, 0.125, bias=dense_bias(bounds, query))
        else:
            plan = plan_attention(query, bounds)
            if plan is None:
                raise RuntimeError(f"attention has no plan for {bounds}")
            attended = plan.attend(query, key, value, 0.125)
        attended.transpose(1, 2).reshape(batch, length, -1).sum().backward()
        fused.grad = None
        seconds.append(time.perf_counter() - started_at)
    settings: dict[str, Any] = {"length": length, "heads": heads, "micro_batch_size": batch, "dtype": flags.dtype}
    megabytes = (resident_bytes() - before) / 1e6
    print_figure("attention", f"{flags.case}_peak_memory", megabytes, "MB", **settings)
    print_figure("attention", f"{flags.case}_time", min(seconds), "s", **settings)


def dense_bias(bounds: Bounds, query: torch.Tensor) -> torch.Tensor:
    """The mask of a micro-batch. Shapes: query `[b, a, s, d]`; result `[b or 1, 1, s, s]`."""
    bias = local_bias(query, query.shape[2], bounds.window, ())
    if bounds.segment_ids is None:
        return bias
    segments = bounds.segment_ids
    return bias.masked_fill((segments.unsqueeze(2) != segments.unsqueeze(1)).unsqueeze(1), -torch.inf)


def documents(flags: AttentionFlags) -> torch.Tensor:
    """Document numbers of documents of random lengths, the same in every run. Shapes: `[b, s]`."""
    generator = torch.Generator().manual_seed(1)
    segments = torch.zeros(flags.micro_batch_size, flags.length, dtype=torch.int64)
    for sample in segments:
        sample[torch.randperm(flags.length - 1, generator=generator)[: flags.documents - 1] + 1] = 1
    return segments.cumsum(dim=1)


def resident_bytes() -> int:
    """The highest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


if __name__ == "__main__":
    process_exit.exit_with(main)
