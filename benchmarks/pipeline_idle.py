"""Idle time of the ranks of a pipeline, compared with the schedule's simulation.

    python benchmarks/pipeline_idle.py

The executor of the engine runs schedules over processes whose layers sleep instead of computing: a forward pass and
each half of a backward pass equally long, so that two cores are enough for any number of ranks. One JSON line a figure:
the idle share of each schedule beside the simulated one, by how much sleeps took longer than they were to, which counts
as busy, and how many more activations than simulated a rank held.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
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
from megatron.engine.pipeline.chunk_pass import ChunkRunner
from megatron.engine.pipeline.chunks import Chunks
from megatron.engine.pipeline.executor import Executor
from megatron.model.interface.layer_cost import LayerCost
from megatron.model.interface.network import LayerKind, LayerSpec, LayerStack
from megatron.model.interface.step_context import StepContext, StepSettings
from megatron.parallel.mesh import Axis
from megatron.parallel.schedule.building import build_schedule
from megatron.parallel.shard_spec import Dimension
from megatron.parallel.tensor.layers import ColumnParallelLinear

_WIDTH = 4
NO_GRADIENTS: Any = SimpleNamespace(**dict.fromkeys(("begin_last", "accumulate", "end_last"), lambda _: None))


@dataclass(frozen=True)
class IdleFlags(ConfigSection):
    """Flags of this program."""

    ranks: int = flag(4, "pipeline ranks", at_least=2)
    micro_batches: int = flag(8, "micro-batches of a step", at_least=1)
    milliseconds: float = flag(120.0, "a forward pass of all layers of a rank")
    steps: int = flag(3, "steps measured with each schedule", at_least=1)
    schedules: tuple[str, ...] = flag(tuple(SCHEDULE_CHUNKS), "schedules", nargs="+", choices=tuple(SCHEDULE_CHUNKS))


class SleepingLayer(ColumnParallelLinear):
    """Takes as long in the forward pass as in each half of the backward pass, without computing."""

    def __init__(self) -> None:
        super().__init__(_WIDTH, [Dimension("outputs", _WIDTH)], Axis.single("tp"), bias=False)
        self.seconds = self.slept = 0.0

    def sleep(self) -> None:
        """Sleeps, and notes how long it was."""
        began_at = time.perf_counter()
        time.sleep(self.seconds)
        self.slept += time.perf_counter() - began_at

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:  # type: ignore[override]
        """Sleeps."""
        return _Sleep.apply(hidden, self.weight, self)  # type: ignore[no-any-return]


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, layer):  # type: ignore[no-untyped-def]
        ctx.layer = layer
        layer.sleep()
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        layer = ctx.layer
        layer.sleep()
        if layer.queue is not None and layer.queue.is_open:
            layer.queue.add(layer.sleep)
        else:
            layer.sleep()
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
    for name in flags.schedules:
        chunks, _ = SCHEDULE_CHUNKS[name]
        steps, peak = run(axis, flags, name, chunks)
        schedule = build_schedule(name, flags.ranks, chunks, flags.micro_batches)
        requested = 3 * flags.milliseconds / 1e3 * flags.micro_batches
        seconds = torch.tensor([step for step, _ in steps], dtype=torch.float64)
        slept = torch.tensor([busy for _, busy in steps], dtype=torch.float64)
        above = torch.tensor(max(0, peak - schedule.peak_alive[rank]))
        dist.all_reduce(seconds, op=dist.ReduceOp.MAX)
        dist.all_reduce(slept)
        dist.all_reduce(above, op=dist.ReduceOp.MAX)
        if rank == 0:
            idle = 100 * (1 - slept / flags.ranks / seconds)
            more = {"simulated": round(100 * schedule.bubble_ratio, 1), "chunks": chunks}
            spread = float(idle.min()), float(idle.max())
            print_figure("pipeline_idle", name, float(idle.min()), "% idle", spread=spread, **more)
            longer = 100 * (float(slept.mean()) / flags.ranks / requested - 1)
            print_figure("pipeline_idle", f"{name}_slept_longer", longer, "%")
            print_figure("pipeline_idle", f"{name}_held_above_simulation", float(above), "activations")
    dist.destroy_process_group()


def run(axis: Axis, flags: IdleFlags, name: str, chunks_per_rank: int) -> tuple[list[tuple[float, float]], int]:
    """The seconds of each step of this rank and how many of them it slept, and the most activations that it held."""
    count = axis.size * chunks_per_rank
    network = [LayerSpec(f"layers.{place}", LayerKind.BLOCK, LayerCost(1), SleepingLayer) for place in range(count)]
    schedule = build_schedule(name, axis.size, chunks_per_rank, flags.micro_batches)
    chunks = Chunks.of(network, schedule.placement, axis.rank)
    held: list[int] = []
    runner = ChunkRunner(LayerStack(chunks.specs), chunks, splits_backward=schedule.splits_backward)
    executor = Executor(runner, axis, axis, NO_GRADIENTS, lambda _: None)
    settings = StepSettings(hidden_size=_WIDTH)
    hidden = torch.zeros(1, 2, _WIDTH, requires_grad=True)
    batch = DeviceBatch((hidden,), (torch.zeros(1, dtype=torch.int64),), (1, 2), 0, (), ())
    losses: Any = SimpleNamespace(
        settings=settings,
        seed=lambda: torch.ones(()),
        auxiliary_network=None,
        context_of=lambda each: each.context(settings, 1.0),
        add_auxiliary=lambda auxiliary: None,
        loss=lambda outputs, targets, extra_targets: outputs.sum(),
    )
    layers = [layer for layer in runner.stack.modules() if isinstance(layer, SleepingLayer)]
    steps = []
    for number in range(flags.steps + 1):
        for layer in layers:  # a first step without sleep warms up
            layer.seconds = flags.milliseconds / 1e3 / chunks_per_rank if number else 0.0
        dist.barrier()
        slept = sum(layer.slept for layer in layers)
        started_at = time.perf_counter()
        batches = [batch] * flags.micro_batches
        held.append(executor.run(schedule.actions[axis.rank], batches, losses, trains=True))
        seconds = time.perf_counter() - started_at
        steps.append((seconds, sum(layer.slept for layer in layers) - slept))
    return steps[1:], max(held)


if __name__ == "__main__":
    sys.exit(main())
