"""Trains the reference recipe through the real stack, on one rank of some layout."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.data.loader import Batch
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.networks import build_gpt
from tests.parity.reference import Recipe, batch_mask, batch_tokens

# tp, pp, dp with a world of at most four processes
LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2), (1, 2, 2)]


def layout_name(layout: tuple[int, int, int]) -> str:
    """How a layout is named in a test's id."""
    tp, pp, dp = layout
    return f"tp{tp}-pp{pp}-dp{dp}"


def legal_zero_stages(pp: int) -> list[int]:
    """The ZeRO stages DeepSpeed runs at a pipeline size."""
    return [0, 1] if pp > 1 else [0, 1, 2, 3]


def layout_flags(recipe: Recipe, layout: tuple[int, int, int], zero_stage: int, extra: list[str]) -> list[str]:
    """The command line of the recipe in a layout."""
    tp, pp, _ = layout
    pairs = {
        "--num-layers": recipe.num_layers,
        "--hidden-size": recipe.hidden_size,
        "--num-attention-heads": recipe.heads,
        "--seq-length": recipe.sequence_length,
        "--max-position-embeddings": recipe.sequence_length,
        "--micro-batch-size": recipe.micro_batch_size,
        "--global-batch-size": recipe.global_batch_size,
        "--train-iters": recipe.steps,
        "--lr": recipe.learning_rate,
        "--lr-decay-style": "constant",
        "--weight-decay": recipe.weight_decay,
        "--clip-grad": recipe.clip,
        "--hidden-dropout": 0,
        "--attention-dropout": 0,
        "--tensor-model-parallel-size": tp,
        "--pipeline-model-parallel-size": pp,
        "--zero-stage": zero_stage,
        "--make-vocab-size-divisible-by": 8,
    }
    flags = [str(part) for pair in pairs.items() for part in pair]
    return [*flags, "--data-path", "none", "--vocab-file", "none", "--merge-file", "none", *extra]


def layout_config(
    recipe: Recipe, layout: tuple[int, int, int], zero_stage: int, extra: list[str], machine: Machine | None = None
) -> RunConfig:
    """The resolved configuration of the recipe in a layout; on CPUs if no machine is given."""
    tp, pp, dp = layout
    machine = machine or Machine(device_type="cpu", world_size=tp * pp * dp, supports_fp16=False, supports_bf16=True)
    tokenizer = TokenizerFacts(vocab_size=recipe.vocab_size, eod_id=0, fingerprint="none")
    return resolve(parse(layout_flags(recipe, layout, zero_stage, extra)), machine, tokenizer)


def local_batches(recipe: Recipe, config: RunConfig, mesh: ParallelMesh, step: int, uneven: bool) -> list[Batch]:
    """This rank's micro-batches of one global batch, distributed as by the loader."""
    tokens = batch_tokens(recipe, step).numpy()
    mask = batch_mask(recipe, step, uneven).numpy()
    micro, copies = config.optim.micro_batch_size, mesh.batch.size
    batches = []
    for first in range(mesh.batch.rank * micro, len(tokens), micro * copies):
        rows = slice(first, first + micro)
        ids = np.arange(first, first + micro, dtype=np.int64) + step * len(tokens)
        batches.append(
            Batch(
                np.ascontiguousarray(tokens[rows, :-1]),
                np.ascontiguousarray(tokens[rows, 1:]),
                np.ascontiguousarray(mask[rows]),
                ids,
                None,
            )
        )
    return batches


def initial_weights(recipe: Recipe, extra: Sequence[str] = ()) -> dict[str, torch.Tensor]:
    """The weights every layout starts from, under their global names, without vocabulary padding."""
    config = layout_config(recipe, (1, 1, 1), 0, list(extra))
    module = build_gpt(config.model, ParallelMesh.single())
    return {
        parameter.global_name: parameter.detach()
        .view(-1)[: shard_spec_of(parameter).box_numel]
        .view(-1, *parameter.shape[1:])
        for parameter in module.parameters()
    }


def train_layouts(
    rank: int,
    recipe: Recipe,
    layout: tuple[int, int, int],
    zero_stages: list[int],
    extra: list[str],
    uneven: bool = False,
    evaluate_at: int | None = None,
) -> dict[int, list[tuple[float, float]]]:
    """Trains the recipe once per ZeRO stage and returns the curves of (loss, gradient norm)."""
    curves = {}
    mesh = None
    for stage in zero_stages:
        config = layout_config(recipe, layout, stage, extra)
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        curve = []
        for step in range(recipe.steps):
            if step == evaluate_at:
                engine.evaluate(local_batches(recipe, config, mesh, step, uneven))
            result = engine.train_batch(local_batches(recipe, config, mesh, step, uneven), recipe.learning_rate)
            curve.append((result.loss, result.gradient_norm))
        curves[stage] = curve
    return curves
