"""Closed-form memory compared with the memory that one rank of an engine holds."""

from __future__ import annotations

import pytest

from tests.trident.plan.counted import counted
from trident.plan.hardware import Cluster, device_of, links_of
from trident.plan.job import Job
from trident.plan.layouts import BLOCKS
from trident.plan.memory import memory_of_ranks
from trident.plan.report import memory_lines
from trident.plan.requests import cluster_of, job_of, layout_of, read_plan_request
from trident.plan.search import LayoutEstimate, estimate

LLAMA = (
    *("--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"),
    *("--untie-embeddings-and-output-weights", "--ffn-hidden-size", "192"),
)
LATENT = (
    *("--multi-latent-attention", "--q-lora-rank", "32", "--kv-lora-rank", "24", "--qk-head-dim", "16"),
    *("--qk-pos-emb-head-dim", "8", "--v-head-dim", "16", "--qk-layernorm"),
)
MTP = (*LLAMA, "--mtp-num-layers", "2")
TP2, PP2 = ("--tensor-model-parallel-size", "2"), ("--pipeline-model-parallel-size", "2")
# Flags, the number of ranks, and the rank that is counted.
CASES = {
    "one rank": (("--micro-batch-size", "4"), 1, 0),
    "fp32": (("--micro-batch-size", "4", "--no-bf16"), 1, 0),
    "tensor 2": ((*TP2, "--micro-batch-size", "4"), 2, 1),
    "tensor 2, sequence parallel": ((*TP2, "--sequence-parallel", "--micro-batch-size", "4"), 4, 1),
    "llama, tensor 2": ((*LLAMA, *TP2, "--sequence-parallel", "--micro-batch-size", "4"), 2, 0),
    "latents": ((*LLAMA, *LATENT, "--micro-batch-size", "4"), 1, 0),
    "latents, tensor 2": ((*LLAMA, *LATENT, *TP2, "--sequence-parallel", "--micro-batch-size", "4"), 2, 1),
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
    "gated attention": ((*LLAMA, "--attention-output-gate", "--micro-batch-size", "4"), 1, 0),
    "lion": (("--optimizer", "lion", "--micro-batch-size", "4"), 4, 1),
    "sgd": (("--optimizer", "sgd", "--micro-batch-size", "4"), 1, 0),
    "sgd without momentum": (
        ("--optimizer", "sgd", "--sgd-momentum", "0", "--no-bf16", "--micro-batch-size", "2"),
        1,
        0,
    ),
    "muon": (("--optimizer", "muon", "--micro-batch-size", "4"), 1, 0),
    "a mean of the weights": (("--ema-decay", "0.9", "--micro-batch-size", "4"), 2, 0),
    "multi-token prediction": ((*MTP, "--micro-batch-size", "4"), 1, 0),
    "multi-token prediction, last of a pipeline": (
        (*MTP, *PP2, "--micro-batch-size", "2", "--global-batch-size", "8"),
        2,
        1,
    ),
    "ring of 2": (("--context-parallel-size", "2", "--micro-batch-size", "4"), 2, 0),
}


@pytest.mark.full
@pytest.mark.parametrize(("flags", "world_size", "rank"), CASES.values(), ids=CASES)
def test_closed_form_is_within_ten_percent(flags: tuple[str, ...], world_size: int, rank: int) -> None:
    words = flags if "--no-bf16" in flags else ("--bf16", *flags)
    found = counted(words, rank, world_size)
    layout = layout_of(found.request, world_size)
    size = 2 if found.config.precision.bf16 else 4
    cluster = Cluster(device_of("h100"), links_of("nvlink+ib400"), world_size, 8)
    optim = found.config.optim
    job = Job(
        found.config.model,
        128,
        optim.global_batch_size,
        size,
        cluster,
        has_fused_kernels=False,
        block_state_bytes=optim.state_bytes(of_blocks=True),
        end_state_bytes=optim.state_bytes(of_blocks=False),
    )
    pipeline_rank = rank * layout.pp // world_size
    memory = memory_of_ranks(job, layout)[pipeline_rank]
    planned = (memory.weights, memory.held_gradients, memory.optimizer, memory.activations)
    held = (found.weights, found.gradients, found.optimizer, found.activations)
    assert sum(planned) == pytest.approx(sum(held), rel=0.1), (planned, held)
    assert memory.optimizer == pytest.approx(found.optimizer, rel=0.02), (planned, held)
    if layout.recompute != BLOCKS:  # parts of the block that is being recomputed are counted as well
        assert memory.activations == pytest.approx(found.activations, rel=0.15), (planned, held)


def planned(*flags: str) -> LayoutEstimate:
    """The estimate of eight billion parameters on eight devices."""
    words = ["--model-preset", "llama-3-8b", "--planned-devices", "8", "--bf16", "--zero-stage", "1", *flags]
    _, request = read_plan_request(words)
    return estimate(job_of(request, cluster_of(request)), layout_of(request, 8))


def test_memory_of_the_optimizer() -> None:
    """An eighth of the parameters' fp32 weights and moments, in the host's memory where it is offloaded."""
    adam = planned()
    own = 4 * adam.job.parameters / 8
    assert adam.memory.optimizer == pytest.approx(3 * own, rel=0.01)
    assert planned("--optimizer", "lion").memory.optimizer == pytest.approx(2 * own, rel=0.01)
    assert planned("--optimizer", "sgd", "--sgd-momentum", "0").memory.optimizer == pytest.approx(own, rel=0.01)
    assert planned("--ema-decay", "0.99").memory.optimizer == pytest.approx(4 * own, rel=0.01)
    ends = 2 * 4 * 128256 * 4096 / 8
    assert planned("--optimizer", "muon").memory.optimizer == pytest.approx(2 * own + ends, rel=0.01)
    offloaded = planned("--cpu-optimizer").memory
    assert (adam.memory.host, offloaded.optimizer) == (0, 0)
    assert offloaded.host == pytest.approx(4 * own, rel=0.01)  # with the gradients that the host reads
    assert offloaded.held_gradients == adam.memory.held_gradients
    assert any("GiB of host memory per rank: 15.0" in line for line in memory_lines(planned("--cpu-optimizer")))


def test_the_matrices_of_muon_cross_ranks() -> None:
    muon, adam = planned("--optimizer", "muon"), planned()
    blocks = adam.job.parameters - 2 * 128256 * 4096
    assert muon.time.sent["dp of matrices"] == pytest.approx(2 * 4 * blocks / 8 * 7 / 8, rel=0.01)
    assert "tp of matrices" not in muon.time.sent
    assert muon.time.parts["matrix messages"] > 0
    assert "matrix messages" not in adam.time.parts
    divided = planned("--optimizer", "muon", "--tensor-model-parallel-size", "2").time.sent
    assert divided["tp of matrices"] == pytest.approx(4 * blocks / 8 / 2 * 2, rel=0.01)
