"""Memory by closed form beside what one rank of an engine holds, in layouts of every kind."""

from __future__ import annotations

import pytest

from megatron.planning.hardware import Cluster, device_of, links_of
from megatron.planning.job import Job
from megatron.planning.layouts import BLOCKS
from megatron.planning.memory import memory_of_ranks
from megatron.planning.requests import layout_of
from tests.planning.counted import counted

LLAMA = (
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--ffn-hidden-size", "192"),
)
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
# Flags, the number of ranks, and the rank that is counted.
CASES = {
    "one rank": (("--micro-batch-size", "4"), 1, 0),
    "fp32": (("--micro-batch-size", "4", "--no-bf16"), 1, 0),
    "tensor 2": ((*TP2, "--micro-batch-size", "4"), 2, 1),
    "tensor 2, sequence parallel": ((*TP2, "--sequence-parallel", "--micro-batch-size", "4"), 4, 1),
    "llama, tensor 2": ((*LLAMA, *TP2, "--sequence-parallel", "--micro-batch-size", "4"), 2, 0),
    "pipeline": ((*PP2, "--micro-batch-size", "2", "--global-batch-size", "8"), 2, 0),
    "last of a pipeline": ((*PP2, "--micro-batch-size", "2", "--global-batch-size", "8"), 2, 1),
    "interleaved": (
        (*PP2, "--virtual-pipeline-model-parallel-size", "2", "--micro-batch-size", "2", "--global-batch-size", "16"),
        4,
        0,
    ),
    "zbv": ((*PP2, "--pipeline-schedule", "zbv", "--micro-batch-size", "2", "--global-batch-size", "8"), 2, 0),
    "ZeRO 2": (("--zero-stage", "2", "--micro-batch-size", "4"), 4, 1),
    "attention recomputed": (("--recompute-granularity", "selective", "--micro-batch-size", "4"), 2, 0),
    "blocks recomputed": (("--recompute-granularity", "full", "--micro-batch-size", "8"), 2, 0),
    "ring of 2": (("--context-parallel-size", "2", "--micro-batch-size", "4"), 2, 0),
}


@pytest.mark.parametrize(("flags", "world_size", "rank"), CASES.values(), ids=CASES)
def test_the_closed_form_is_within_a_tenth_of_what_is_counted(
    flags: tuple[str, ...], world_size: int, rank: int
) -> None:
    words = flags if "--no-bf16" in flags else ("--bf16", *flags)
    found = counted(words, rank, world_size)
    layout = layout_of(found.request, world_size)
    size = 2 if found.config.precision.bf16 else 4
    cluster = Cluster(device_of("h100"), links_of("nvlink+ib400"), world_size, 8)
    optim = found.config.optim
    job = Job(found.config.model, 128, optim.global_batch_size, size, cluster, has_fused_kernels=False)
    pipeline_rank = rank * layout.pp // world_size
    memory = memory_of_ranks(job, layout)[pipeline_rank]
    planned = (memory.weights, memory.held_gradients, memory.optimizer, memory.activations)
    held = (found.weights, found.gradients, found.optimizer, found.activations)
    assert sum(planned) == pytest.approx(sum(held), rel=0.1), (planned, held)
    if layout.recompute != BLOCKS:  # parts of the block that is being recomputed are counted as well
        assert memory.activations == pytest.approx(found.activations, rel=0.15), (planned, held)
