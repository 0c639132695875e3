"""What a run that ran out of memory says: what it takes by kind, and the next layout that fits."""

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
from trident.plan.requests import cluster_of, next_that_fits, read_planned

_CPU_TEXT = "DefaultCPUAllocator: can't allocate memory"


@contextlib.contextmanager
def explained_memory(argv: Sequence[str], request: RunRequest) -> Iterator[None]:
    """Adds to an error of the allocator what the planner knows about the run.

    Raises:
        OutOfMemoryError: the device's memory, or the machine's, was not enough.
    """
    try:
        yield
    except (torch.OutOfMemoryError, RuntimeError) as failure:
        if not isinstance(failure, torch.OutOfMemoryError) and _CPU_TEXT not in str(failure):
            raise
        first = (str(failure).splitlines() or [""])[0].rstrip(".")
        try:
            advice = " ".join(_advice(argv, request))
        except Exception:  # a hint that fails must not replace the error that it is about
            advice = "Use a smaller --micro-batch-size, --recompute-granularity full, or more ranks."
        raise OutOfMemoryError(f"{first}. {advice}") from failure


def _advice(argv: Sequence[str], request: RunRequest) -> Iterator[str]:
    words, _ = read_planned(argv, request.program)
    ranks = launched_ranks(request.parallel.local_rank)
    cluster = cluster_of(request, ranks.world_size)
    name = device.device_name().lower()
    known = next((each for each in DEVICES.values() if each.name.split("-")[0] in name), cluster.device)
    if device.device_type() == "cuda":
        room = largest_gpu_memory_bytes() or known.memory_bytes
    else:
        room = (total_memory_bytes() or known.memory_bytes) / (ranks.world_size if ranks.is_one_node else 1)
    cluster = dataclasses.replace(
        cluster, device=dataclasses.replace(known, memory_bytes=room), devices=ranks.world_size
    )
    own, other = next_that_fits(words, request, cluster)
    yield f"This layout ({own.layout}) takes by estimate:"
    yield from (line.strip() + "." for line in memory_lines(own))
    if other is None:
        yield "No other layout of these devices is estimated to take less and fit: use more of them."
    else:
        yield f"The next that fits: {other.layout}: {' '.join(other.layout.words())}."
        yield from (line.strip() + "." for line in memory_lines(other))
