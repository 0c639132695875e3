"""The cost of creating process groups per rank of a large run: `new_group` calls and seconds, without other ranks.

    python benchmarks/mesh.py --world-size 16384

Prints one JSON line per measurement. Groups are created on torch's fake backend, without communication; on a cluster
every call also waits for the other ranks of its group. The last measurement is the rejection of a layout that does not
match the world size.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.figures import print_figure
from megatron import process_exit
from megatron.config import ConfigSection, flag, parse_flags
from megatron.config.rules.layout import layout_problems
from megatron.parallel.mesh import build_mesh, standard_axes


@dataclass(frozen=True)
class MeshFlags(ConfigSection):
    """Flags of this program."""

    world_size: int = flag(4096, "ranks of the run", at_least=2)
    tensor_model_parallel_size: int = flag(8, "tensor-parallel ranks", at_least=1)
    pipeline_model_parallel_size: int = flag(16, "pipeline stages", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Builds the mesh of the first rank and of one in a middle stage, and prints the measurements."""
    words = sys.argv[1:] if argv is None else argv
    flags = parse_flags(MeshFlags, words, prog="mesh.py", description=__doc__ or "")
    world_size, tp, pp = flags.world_size, flags.tensor_model_parallel_size, flags.pipeline_model_parallel_size
    sizes = standard_axes(world_size, tp=tp, pp=pp)
    for place, rank in (("first", 0), ("middle", world_size // 2)):
        with fake_rank(rank, world_size), counted_groups() as calls:
            started_at = time.perf_counter()
            build_mesh(sizes, "cpu", 0, timedelta(minutes=10))
            seconds = time.perf_counter() - started_at
        print_figure("mesh", "new_group_calls", len(calls), "calls", world_size=world_size, stage=place)
        print_figure("mesh", "seconds_to_create_groups", seconds, "s", world_size=world_size, stage=place)
    started_at = time.perf_counter()
    problems = list(layout_problems(world_size, 7, 11))
    seconds = time.perf_counter() - started_at
    print_figure("mesh", "seconds_to_refuse_a_layout", seconds, "s", world_size=world_size, refused=len(problems))
    return 0


@contextmanager
def fake_rank(rank: int, world_size: int) -> Iterator[None]:
    """Makes this process one rank of a run whose other ranks do not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def counted_groups() -> Iterator[list[Any]]:
    """Yields a list that grows with every call of `new_group`."""
    create, calls = dist.new_group, []

    def count(ranks: Any = None, **options: Any) -> Any:
        calls.append(ranks)
        return create(ranks, **options)

    dist.new_group = count
    try:
        yield calls
    finally:
        dist.new_group = create


if __name__ == "__main__":
    process_exit.exit_with(main)
