"""Ranks that share each sequence train as one process does: rings, Ulysses and both, with every other axis."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest

from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.data.loader import Batch, predicted_positions
from megatron.model.blocks.router import PASSES
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.train.objectives import names_predicted
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_flags, local_batches
from tests.parity.reference import Recipe

RECIPE = Recipe(num_layers=2, steps=2, global_batch_size=4, micro_batch_size=1)
MASKED = "--objective masked --bidirectional --masked-lm-head"
SENTENCES = "--masked-samples sentences --sentence-order-head --num-token-types 2"
DROPS = "--hidden-dropout 0.1"
PADDED = "--seq-length 13 --max-position-embeddings 16"  # which is no multiple of anything
RING_4, RING_2 = "--context-parallel-size 4", "--context-parallel-size 2"
MIXED = "--context-parallel-size 4 --cp-comm-type a2a+p2p --hierarchical-context-parallel-sizes 2 2"

LATENT = (  # without biases: one of all keys changes no score, so its gradient is rounding, which Adam makes large
    "--multi-latent-attention --q-lora-rank 20 --kv-lora-rank 12 --qk-head-dim 8 --qk-pos-emb-head-dim 4 --v-head-dim "
    "10 --qk-layernorm --normalization RMSNorm --position-embedding-type rope --no-add-bias-linear"
)

Step = tuple[float, float, list[float]]


class Case(NamedTuple):
    """A layout of four ranks, and a network with its data."""

    layout: str
    network: str = ""
    zero_stage: int = 1


CASES = {
    "ring": Case(RING_4, DROPS),
    "ring-rope-recompute": Case(
        RING_4, "--position-embedding-type rope --num-query-groups 2 --checkpoint-activations", 3
    ),
    "ring-documents-dp": Case(RING_2, f"--reset-attention-mask --reset-position-ids {DROPS}", 2),
    "ring-window-alibi-tp": Case(
        f"{RING_2} --tensor-model-parallel-size 2", "--position-embedding-type alibi --attention-window 5"
    ),
    "ring-softcap-pp": Case(
        f"{RING_2} --pipeline-model-parallel-size 2",
        "--attention-logit-softcap 5 --reset-attention-mask --num-query-groups 1",
        0,
    ),
    "ring-sinks-documents-tp": Case(
        f"{RING_2} --tensor-model-parallel-size 2",
        "--softmax-type learnable --reset-attention-mask --attention-output-gate",
    ),
    "mixed-sinks": Case(MIXED, "--softmax-type learnable --attention-window 5 --attention-output-gate"),
    "ring-latents-sequence-parallel": Case(
        f"{RING_2} --tensor-model-parallel-size 2 --sequence-parallel", f"{LATENT} --reset-attention-mask"
    ),
    "ring-sample-means": Case(RING_4, "--loss-mean samples --z-loss-coeff 0.01 --label-smoothing 0.1"),
    "ring-experts": Case(RING_2, "--num-experts 4 --moe-router-topk 2 --moe-aux-loss-coeff 0.1 --no-add-bias-linear"),
    "ulysses": Case("--ds-sequence-parallel-size 4", f"--attention-dropout 0.2 {DROPS}", 0),
    "ulysses-documents": Case(
        f"{RING_4} --cp-comm-type a2a", "--reset-attention-mask --num-query-groups 2 --recompute-activations", 3
    ),
    "ulysses-alibi-pp": Case(
        f"{RING_2} --cp-comm-type a2a --pipeline-model-parallel-size 2",
        "--position-embedding-type alibi --attention-dropout 0.1 --attention-window 4",
    ),
    "ulysses-prefix": Case(
        "--ds-sequence-parallel-size 2",
        "--objective prefix --loss-on-targets-only --reweight-loss-based-on-position-frequency",
    ),
    "ring-schedule": Case(
        f"{RING_2} --pipeline-model-parallel-size 2 --pipeline-schedule zb-h1 --pipeline-engine own", DROPS
    ),
    "ring-sequence-parallel": Case(
        f"{RING_2} --tensor-model-parallel-size 2 --sequence-parallel", f"--reset-attention-mask {DROPS}"
    ),
    "ulysses-sequence-parallel": Case(
        f"{RING_2} --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel",
        f"{DROPS} --checkpoint-activations",
    ),
    "sequence-parallel-4": Case("--tensor-model-parallel-size 4 --sequence-parallel", DROPS),
    "sequence-parallel-pp": Case(
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        f"--attention-dropout 0.1 {DROPS}",
        2,
    ),
    "sequence-parallel-latents-pp": Case(
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        f"{LATENT} --attention-dropout 0.1 {DROPS} --recompute-activations",
    ),
    "sequence-parallel-padded": Case(
        "--tensor-model-parallel-size 2 --sequence-parallel --pipeline-model-parallel-size 2",
        f"{PADDED} --reset-attention-mask --reset-position-ids --attention-dropout 0.1 {DROPS}",
        2,
    ),
    "sequence-parallel-sentences-padded": Case(
        "--tensor-model-parallel-size 4 --sequence-parallel", f"{MASKED} {SENTENCES} {PADDED}", 3
    ),
    "ring-masked": Case(RING_4, f"{MASKED} {DROPS}", 3),
    "ring-sentences-padded": Case(RING_4, f"{MASKED} {SENTENCES} {PADDED}"),
    "sentences-sequence-parallel": Case(
        f"{RING_2} --cp-comm-type a2a --tensor-model-parallel-size 2 --sequence-parallel", f"{MASKED} {SENTENCES}", 3
    ),
    "ulysses-prefix-padded": Case("--ds-sequence-parallel-size 4", f"--objective prefix {PADDED}"),
    "ulysses-masked": Case("--ds-sequence-parallel-size 2", f"{MASKED} --attention-dropout 0.1"),
    "ring-bf16": Case(RING_4, f"--bf16 --reset-attention-mask {DROPS}", 2),
    "ulysses-bf16": Case("--ds-sequence-parallel-size 4", f"--bf16 --reset-attention-mask {DROPS}", 2),
    "mixed": Case(MIXED, f"--num-query-groups 1 --reset-attention-mask {DROPS}"),
    "mixed-flags": Case("--context-parallel-size 2 --ds-sequence-parallel-size 2", DROPS, 0),
}


class Limits(NamedTuple):
    """How far a layout may be from one process, relative; `metric` also of an evaluation."""

    loss: float
    norm: float
    metric: float


def limits_of(name: str) -> Limits:
    """In bfloat16 the result of attention is rounded otherwise in blocks, and weights of the next step with it."""
    if "--bf16" in CASES[name].network:
        return Limits(1e-3, 1e-2, 1e-3)
    is_ring = not name.startswith(("ulysses", "sequence-parallel"))
    return Limits(1e-6 if is_ring else 4e-7, 1e-6, 4e-6)


def case_config(case: Case, world_size: int) -> RunConfig:
    """The resolved configuration of a case; one process trains whole sequences."""
    layout = case.layout if world_size > 1 else ""
    extra = [*layout.split(), *case.network.split()]
    flags = layout_flags(RECIPE, (1, 1, 1), case.zero_stage if world_size > 1 else 0, extra)
    machine = Machine(device_type="cpu", world_size=world_size, supports_fp16=False, supports_bf16=True)
    return resolve(parse(flags), machine, TokenizerFacts(vocab_size=RECIPE.vocab_size, eod_id=0, fingerprint="none"))


def batches(config: RunConfig, mesh: ParallelMesh, step: int) -> list[Batch]:
    """Micro-batches whose samples have several documents and count very different numbers of tokens."""
    made = []
    length = config.data.seq_length
    for batch in local_batches(RECIPE, config, mesh, step, uneven=True):
        parts = {name: getattr(batch, name)[:, :length] for name in ("tokens", "labels", "loss_mask")}
        batch = dataclasses.replace(batch, **parts)
        ends = batch.tokens % 7 == 0
        prefix = np.arange(batch.tokens.shape[1]) < 3 + batch.sample_ids[:, None] % 5
        batch = dataclasses.replace(batch, segment_ids=np.cumsum(ends, axis=1) - ends, prefix_mask=prefix)
        if config.loss.objective == "masked":
            batch.loss_mask[:, 0] = 0
            batch = dataclasses.replace(batch, token_types=prefix.astype(np.int64), swapped=batch.sample_ids % 2)
            if names_predicted(config):
                predicted = predicted_positions(batch.loss_mask, batch.tokens.shape[1])
                batch = dataclasses.replace(batch, predicted=predicted)
        made.append(batch)
    return made


def train(rank: int, names: list[str], world_size: int) -> dict[str, tuple[list[Step], tuple[float, float]]]:
    """Losses, norms and metrics of each case, and an evaluation."""
    figures = {}
    for case in names:
        config = case_config(CASES[case], world_size)
        mesh = open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        curve = []
        for step in range(RECIPE.steps):
            result = engine.train_batch(batches(config, mesh, step), RECIPE.learning_rate)
            assert result.loss is not None
            passes = result.sums.get(PASSES, [1.0])[0]  # what routers record is a mean over these
            means = [
                sum(values) / (1 if name.startswith("router_expert_tokens") else passes)
                for name, values in result.sums.items()
            ]
            curve.append((result.loss, result.gradient_norm, means))
        figures[case] = (curve, engine.evaluate(batches(config, mesh, 9)))
    return figures


FEW = [
    *(
        "ring-documents-dp",
        "ring-window-alibi-tp",
        "ring-sample-means",
        "ring-experts",
        "ring-sentences-padded",
        "mixed-sinks",
    ),
    *("ring-latents-sequence-parallel", "sequence-parallel-latents-pp"),
    *("ulysses-alibi-pp", "ulysses-prefix", "sequence-parallel-4", "sequence-parallel-padded"),
    *("sequence-parallel-sentences-padded", "ring-bf16", "ulysses-bf16"),
]


@pytest.mark.full
@pytest.mark.parametrize("names", mark_campaign([FEW, list(CASES)], [FEW]), ids=["few", "all"])
def test_losses_and_norms_are_those_of_one_process(names: list[str]) -> None:
    (alone,) = run_ranks(train, 1, names, 1)
    for of_rank in run_ranks(train, 4, names, 4, timeout_seconds=300):
        for name in names:
            limit = limits_of(name)
            steps, evaluated = of_rank[name]
            wanted, wanted_evaluated = alone[name]
            for (loss, norm, means), (true_loss, true_norm, true_means) in zip(steps, wanted, strict=True):
                assert loss == pytest.approx(true_loss, rel=limit.loss), name
                assert norm == pytest.approx(true_norm, rel=limit.norm), name
                assert means == pytest.approx(true_means, rel=limit.metric), name
            assert evaluated == pytest.approx(wanted_evaluated, rel=limit.metric), name
