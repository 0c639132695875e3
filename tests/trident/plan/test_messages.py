"""Planned messages compared with those that the simulation of a rank records."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Mapping

import pytest

from megatron.config import Machine, TokenizerFacts, parse, resolve
from trident.plan.dry_run.programs import RankProgram
from trident.plan.dry_run.rank_simulation import simulate_rank
from trident.plan.dry_run.recording import RECEIVE, SEND, RankMessage
from trident.plan.layouts import costs_of_schedule
from trident.plan.messages import sent_in_step
from trident.plan.requests import cluster_of, job_of, layout_of, read_plan_request

NETWORK = (
    *("--num-layers", "2", "--hidden-size", "256", "--num-attention-heads", "8", "--seq-length", "256"),
    *(
        "--max-position-embeddings",
        "256",
        "--position-embedding-type",
        "rope",
        "--swiglu",
        "--normalization",
        "RMSNorm",
    ),
    *("--disable-bias-linear", "--hidden-dropout", "0", "--attention-dropout", "0", "--vocab-size", "512"),
    *("--lr", "1e-3", "--train-iters", "9", "--data-path", "x", "--vocab-file", "v", "--merge-file", "m", "--bf16"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--eval-iters", "0"),
)
GROUPED = "--group-query-attention --num-query-groups 4 --untie-embeddings-and-output-weights"
LATENT = "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 32 --qk-pos-emb-head-dim 16"
EXPERTS = "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 128 --expert-model-parallel-size"
TP, TP8 = "--tensor-model-parallel-size 2", "--tensor-model-parallel-size 8"
SPLIT, WHOLE = "--sequence-parallel", "--sequence-parallel --expert-tensor-parallel-size 1"
PP = "--num-layers 4 --pipeline-model-parallel-size"
RING = "--context-parallel-size"
RECOMPUTE = {
    "none": "--no-checkpoint-activations",
    "attention": "--recompute-granularity selective",
    "blocks": "--recompute-granularity full",
}
# With each kind of recomputation: flags and ranks.
RECOMPUTED = {
    "data": (GROUPED, 4),
    "tensor": (f"{GROUPED} {TP}", 2),
    "tensor, sequence": (f"{GROUPED} {TP} {SPLIT}", 2),
    "tensor, keys and values on all": (f"{GROUPED} {TP8}", 8),
    "tensor, sequence, keys and values on all": (f"{GROUPED} {TP8} {SPLIT}", 8),
    "ring": (f"{GROUPED} {RING} 4", 4),
    "Ulysses": (f"{GROUPED} --ds-sequence-parallel-size 2", 2),
    "experts": (f"{EXPERTS} 4", 8),
    "experts, tensor": (f"{EXPERTS} 4 {TP}", 8),
    "experts, tensor, sequence": (f"{EXPERTS} 2 {TP} {SPLIT}", 8),
    "whole experts": (f"{EXPERTS} 4 {TP} {WHOLE}", 8),
    "whole and shared experts": (f"{EXPERTS} 4 {TP} {WHOLE} --moe-shared-expert-intermediate-size 128", 8),
    "latents, tensor": (f"{LATENT} --v-head-dim 32 {TP}", 2),
    "latents, tensor, sequence": (f"{LATENT} --v-head-dim 32 {TP} {SPLIT}", 2),
    "latents, ring": (f"{LATENT} --v-head-dim 32 {RING} 2", 2),
    "multi-token prediction": (f"{GROUPED} --mtp-num-layers 1 {TP}", 2),
    "multi-token prediction, sequence": (f"{GROUPED} --mtp-num-layers 1 {TP} {SPLIT}", 2),
}
ONCE = {
    "ring of Ulysses": (f"{RING} 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2", 4),
    "ZeRO 0": ("--zero-stage 0", 4),
    "ZeRO 2": ("--zero-stage 2", 4),
    "ZeRO 0, fp32": ("--no-bf16 --zero-stage 0", 4),
    "ZeRO 1, fp32": ("--no-bf16 --zero-stage 1", 4),
    "experts, ZeRO 2": (f"{EXPERTS} 2 --zero-stage 2", 4),
    "stages, one embedding": (f"{PP} 2", 4),
    "stages, two embeddings": (f"{GROUPED} {PP} 4 {TP}", 8),
    "interleaved": (f"{PP} 2 {TP} {SPLIT} --virtual-pipeline-model-parallel-size 2", 4),
    "zbv": (f"{PP} 2 --pipeline-schedule zbv", 4),
    "experts, ring": (f"{EXPERTS} 4 {RING} 2", 4),
}
CASES = {
    **{
        f"{name}, {kind} recomputed": (f"{flags} {words}", size)
        for (name, (flags, size)), (kind, words) in itertools.product(RECOMPUTED.items(), RECOMPUTE.items())
    },
    **{name: (f"{flags} {RECOMPUTE['none']}", size) for name, (flags, size) in ONCE.items()},
}
_SCATTERED = pytest.mark.xfail(reason="the engine all-reduces buckets, twice the bytes of a scatter", strict=True)
BYTES = {"bfloat16": 2, "float32": 4, "float64": 8, "int64": 8, "int32": 4, "bool": 1, "uint8": 1}


def cost(message: RankMessage) -> float:
    """Bytes that a rank sends, of a collective as a ring passes them on."""
    count, size = len(message.ranks), message.elements * BYTES[message.dtype]
    if message.kind in (SEND, RECEIVE):
        return size * (message.kind == SEND)
    return (2 if message.kind == "all-reduce" else 1) * (count - 1) / count * size


def axis_of(message: RankMessage, part: str, groups: Mapping[str, tuple[int, ...]]) -> str | None:
    """The axis of a message; None for sums that a plan leaves out."""
    if not message.is_collective:
        return "cp" if len(groups["cp"]) > 1 and message.ranks[1] in groups["cp"] else "pp"
    if part in ("start", "norm and loss"):
        return None
    if message.ranks == groups["tp"]:
        return None if part == "gradients" else "tp"
    if part == "gradients" and message.ranks == groups["embedding"]:
        return "embedding"
    if message.kind == "all-to-all":
        return "cp" if message.ranks == groups["sp"] else "ep"
    return "dp"


def simulated_bytes(program: RankProgram) -> dict[str, float]:
    """Bytes that a rank sends in a step, by axis."""
    sent: dict[str, float] = defaultdict(float)
    for message, part in program.events:
        axis = axis_of(message, part, program.groups)
        if axis is not None:
            sent[axis] += cost(message)
    return sent


@pytest.mark.parametrize(
    ("flags", "size"),
    [pytest.param(*case, id=name, marks=_SCATTERED if "ZeRO 2" in name else ()) for name, case in CASES.items()],
)
def test_planned_bytes_match_the_simulation(flags: str, size: int) -> None:
    argv = [*NETWORK, *flags.split()]
    config = resolve(parse(argv), Machine("cuda", size, True, True), TokenizerFacts(512, 1, ""))
    _, request = read_plan_request([*argv, "--planned-devices", str(size)])
    job, layout = job_of(request, cluster_of(request)), layout_of(request, size)
    placement = costs_of_schedule(layout.schedule, layout.pp, layout.chunks, layout.micro_batches).placement
    for stage in range(layout.pp):
        planned = sent_in_step(job, layout, placement, stage)
        planned["dp"] += planned.pop("dp of experts")
        sent = simulated_bytes(simulate_rank(config, stage * size // layout.pp, size, [16])[0])
        assert {axis: count for axis, count in planned.items() if count} == pytest.approx(
            {axis: count for axis, count in sent.items() if count}, rel=0.1
        )
