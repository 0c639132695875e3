"""Explains an out-of-memory error: the estimated memory by kind, and the next layout that fits."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence

import torch

from megatron import device
from megatron.config import RunRequest
from megatron.cuda_driver import largest_gpu_memory_bytes
from megatron.errors import OutOfMemoryError
from megatron.host_memory import total_memory_bytes
from megatron.parallel.rank_start import launched_ranks
from trident.plan.hardware import DEVICES
from trident.plan.report import memory_lines
from trident.plan.requests import cluster_of, next_fitting, read_plan_request

_CPU_TEXT = "DefaultCPUAllocator: can't allocate memory"


@contextlib.contextmanager
def explained_memory(argv: Sequence[str], request: RunRequest) -> Iterator[None]:
    """Adds the planner's estimate to an error of the allocator.

    Raises:
        OutOfMemoryError: the memory of the device or the host is exhausted.
    """
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as failure:
        if not isinstance(failure, torch.OutOfMemoryError) and _CPU_TEXT not in str(failure):
            raise
        first = (str(failure).splitlines() or [""])[0].rstrip(".")
        try:
            advice = " ".join(_advice(argv, request))
        except Exception:  # a failing hint must not hide the error
            advice = "Use a smaller --micro-batch-size, --recompute-granularity full, or more ranks."
        raise OutOfMemoryError(f"{first}. {advice}") from failure


def _advice(argv: Sequence[str], request: RunRequest) -> Iterator[str]:
    arguments, _ = read_plan_request(argv, request.program)
    ranks = launched_ranks(request.parallel.local_rank)
    cluster = cluster_of(request, ranks.world_size)
    name = device.device_name().lower()
    known = next((each for each in DEVICES.values() if each.name.split("-")[0] in name), cluster.device)
    if device.device_type() == "cuda":
        capacity = largest_gpu_memory_bytes() or known.memory_bytes
    else:
        capacity = (total_memory_bytes() or known.memory_bytes) / (ranks.world_size if ranks.is_one_node else 1)
    cluster = dataclasses.replace(
        cluster, device=dataclasses.replace(known, memory_bytes=capacity), devices=ranks.world_size
    )
    present, other = next_fitting(arguments, request, cluster)
    yield f"Estimate for this layout ({present.layout}):"
    yield from (line.strip() + "." for line in memory_lines(present))
    if other is None:
        yield "No smaller layout of these devices is estimated to fit: use more devices."
    else:
        yield f"Next layout that fits: {other.layout}: {' '.join(other.layout.flags())}."
        yield from (line.strip() + "." for line in memory_lines(other))
