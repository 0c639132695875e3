"""How long are the ranks of a pipeline idle, next to what the schedule's simulation says?

    python benchmarks/pipeline_idle.py

The executor of the engine runs schedules over processes whose layers sleep instead of computing: a forward pass and
each half of a backward pass equally long, so that two cores are enough for any number of ranks. One JSON line a figure:
the idle share of each schedule beside the simulated one, and how many more activations than simulated a rank held.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from benchmarks.figures import print_figure
from megatron.config import ConfigSection, flag, parse_flags
from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.pipeline.chunks import Chunks
from megatron.engine.pipeline.executor import Executor
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec, LayerStack
from megatron.model.interface.step_context import StepContext, StepSettings
from megatron.parallel.mesh import Axis
from megatron.parallel.schedule.building import SCHEDULES, build_schedule
from megatron.parallel.shard_spec import Dimension
from megatron.parallel.tensor.layers import ColumnParallelLinear

_WIDTH = 4


@dataclass(frozen=True)
class IdleFlags(ConfigSection):
    """Flags of this program."""

    ranks: int = flag(4, "pipeline ranks", at_least=2)
    micro_batches: int = flag(8, "micro-batches of a step", at_least=1)
    milliseconds: float = flag(120.0, "a forward pass of all layers of a rank")
    steps: int = flag(3, "steps measured with each schedule", at_least=1)


class SleepingLayer(ColumnParallelLinear):
    """Takes as long in the forward pass as in each half of the backward pass, without computing."""

    def __init__(self, seconds: float) -> None:
        super().__init__(_WIDTH, [Dimension("outputs", _WIDTH)], Axis.single("tp"), bias=False)
        self.seconds = seconds

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:  # type: ignore[override]
        """Sleeps."""
        return _Sleep.apply(hidden, self.weight, self)  # type: ignore[no-any-return]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, layer):  # type: ignore[no-untyped-def]
        ctx.layer = layer
        time.sleep(layer.seconds)
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        layer = ctx.layer
        time.sleep(layer.seconds)
        if layer.queue is not None and layer.queue.is_open:
            layer.queue.add(partial(time.sleep, layer.seconds))
        else:
            time.sleep(layer.seconds)
        return gradient, None, None


def main(argv: Sequence[str] | None = None) -> int:
    """Measures all schedules and prints the figures."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(IdleFlags, words, prog="pipeline_idle.py", description=__doc__ or "")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(measure, (flags, port), nprocs=flags.ranks)
    return 0


def measure(rank: int, flags: IdleFlags, port: int) -> None:
    """One of the ranks; the first prints."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=flags.ranks)
    axis = Axis("pp", rank, flags.ranks, tuple(range(flags.ranks)), dist.group.WORLD)
    for name, (chunks, _) in SCHEDULE_CHUNKS.items():
        seconds, peak = run(axis, flags, name, chunks)
        schedule = build_schedule(name, flags.ranks, chunks, flags.micro_batches)
        busy = 3 * flags.milliseconds / 1e3 * flags.micro_batches
        worst = torch.tensor([seconds, max(0, peak - schedule.peak_alive[rank])], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        if rank == 0:
            idle = 100 * (1 - busy / float(worst[0]))
            simulated = 100 * schedule.bubble_ratio
            print_figure("pipeline_idle", name, idle, "% idle", simulated=round(simulated, 1), chunks=chunks)
            print_figure("pipeline_idle", f"{name}_held_above_simulation", float(worst[1]), "activations")
    dist.destroy_process_group()


def run(axis: Axis, flags: IdleFlags, name: str, chunks_per_rank: int) -> tuple[float, int]:
    """The seconds of the fastest step of this rank, and the most activations that it held."""
    count = axis.size * chunks_per_rank
    build = partial(SleepingLayer, flags.milliseconds / 1e3 / chunks_per_rank)
    network = [LayerSpec(f"layers.{place}", LayerKind.BLOCK, LayerCost(1), build) for place in range(count)]
    schedule = build_schedule(name, axis.size, chunks_per_rank, flags.micro_batches)
    chunks = Chunks.of(network, schedule.placement, axis.rank)
    held: list[int] = []
    executor = Executor(
        LayerStack(chunks.specs), chunks, axis, lambda _: None, lambda _: None, splits_backward=SCHEDULES[name].splits
    )
    settings = StepSettings(hidden_size=_WIDTH)
    hidden = torch.zeros(1, 2, _WIDTH, requires_grad=True)
    batch = DeviceBatch((hidden,), (torch.zeros(1, dtype=torch.int64),), (1, 2), 0, (), ())
    losses: Any = SimpleNamespace(
        settings=settings,
        backward_scale=1.0,
        context_of=lambda each: each.context(settings, 1.0),
        take_auxiliary=lambda auxiliary: None,
        of=lambda outputs, targets: outputs.sum(),
    )
    fastest = float("inf")
    for _ in range(flags.steps):
        dist.barrier()
        started_at = time.perf_counter()
        batches = [batch] * flags.micro_batches
        held.append(executor.run(schedule.actions[axis.rank], batches, losses, trains=True))
        fastest = min(fastest, time.perf_counter() - started_at)
    return fastest, max(held)


if __name__ == "__main__":
    sys.exit(main())
