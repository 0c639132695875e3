"""The planner beside what was measured on one H100 on 2026-11-22, at commit 4f3e6bb8, with the compiled kernels."""

from __future__ import annotations

import pytest

from benchmarks.gpu.shapes import SHAPES
from megatron.planning.requests import cluster_of, job_of, layout_of, read_planned
from megatron.planning.search import LayoutEstimate, estimate

# Network, tokens of a sample, tokens/s and GiB at the peak; steps of 16,384 tokens in one pass.
MEASURED = (
    ("124m", 1024, 263_600, 7.169),
    ("124m", 4096, 282_240, 7.210),
    ("1.3b", 1024, 58_357, 47.103),
    ("1.3b", 4096, 52_390, 47.209),
    ("llama1b", 1024, 67_138, 40.661),
    ("llama1b", 4096, 59_015, 40.662),
)


def planned_step(name: str, length: int) -> LayoutEstimate:
    """What the planner says of such a step."""
    flags = [*SHAPES[name].flags, "--bf16", "--seq-length", str(length), "--max-position-embeddings", str(length)]
    _, request = read_planned([*flags, "--micro-batch-size", str(16384 // length), "--device", "h100"])
    cluster = cluster_of(request, 1)
    return estimate(job_of(request, cluster), layout_of(request, 1))


@pytest.mark.parametrize(("name", "length", "rate", "gib"), MEASURED)
def test_time_and_memory_are_those_of_the_gpu_page(name: str, length: int, rate: float, gib: float) -> None:
    found = planned_step(name, length)
    assert found.time.seconds == pytest.approx(16384 / rate, rel=0.15)
    assert found.memory.counted / 2**30 == pytest.approx(gib, rel=0.1)
