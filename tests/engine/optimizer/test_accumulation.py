"""Gradients of half-precision runs are accumulated in float32, whatever the ZeRO stage."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.engine.state import owned_pieces
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.networks import SEED, build_gpt, forward
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

# 128 micro-batches of 16 tokens: every factor on the loss is a power of 2 and rounds nothing.
RECIPE = dataclasses.replace(
    Recipe(), num_layers=1, steps=1, micro_batch_size=1, global_batch_size=128, weight_decay=0.0, vocab_size=256
)
FLAGS = ["--bf16", "--optimizer", "sgd", "--sgd-momentum", "0", "--clip-grad", "0", "--seed", str(SEED)]
# Relative error of the whole gradient; accumulated in bfloat16 it is above 1e-2. The reference rounds its logits to
# bfloat16, and the head of a run does not.
LIMIT = 4e-3


Pieces = dict[tuple[str, int], torch.Tensor]


def masters(engine: Any) -> Pieces:
    """The fp32 weights that this rank owns, by name and first element."""
    return {(key.name, key.first): tensor.clone() for key, tensor in owned_pieces(engine, with_optimizer=False)}


def stepped(rank: int, ranks: int, stage: int, flags: list[str]) -> tuple[Pieces, str]:
    """How far one step of SGD at rate 1 moved the weights, which is minus the gradient; and what was logged."""
    config = layout_config(RECIPE, (1, 1, ranks), stage, [*FLAGS, *flags])
    mesh = open_mesh(config.parallel)
    with contextlib.redirect_stderr(io.StringIO()) as logged:
        engine = build_engine(config, mesh)
    before = masters(engine)
    engine.train_batch(local_batches(RECIPE, config, mesh, 0, False), 1.0)
    after = masters(engine)
    return {place: tensor - after[place] for place, tensor in before.items()}, logged.getvalue()


def step_of(ranks: int, stage: int, flags: list[str]) -> tuple[torch.Tensor, str]:
    """The same for all ranks together: one tensor, one parameter after the other by name."""
    results = run_ranks(stepped, ranks, ranks, stage, flags)
    pieces = sorted(((place, tensor) for moved, _ in results for place, tensor in moved.items()), key=lambda p: p[0])
    return torch.cat([tensor for _, tensor in pieces]), results[0][1]


@pytest.fixture(scope="module")
def gradients() -> tuple[torch.Tensor, torch.Tensor]:
    """The gradient of the same micro-batches, accumulated in float32 and in bfloat16 by hand."""
    config = layout_config(RECIPE, (1, 1, 1), 1, FLAGS)
    model = build_gpt(config.model).bfloat16()
    parameters = [parameter for _, parameter in sorted(model.named_parameters())]
    single = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in parameters]
    half = [torch.zeros_like(parameter) for parameter in parameters]
    mesh = ParallelMesh.single()
    for batch in local_batches(RECIPE, config, mesh, 0, False):
        logits = forward(model, torch.from_numpy(batch.tokens), torch.from_numpy(batch.sample_ids))
        losses = torch.nn.functional.cross_entropy(
            logits[..., : RECIPE.vocab_size].float().flatten(0, 1), torch.from_numpy(batch.labels).flatten()
        )
        found = torch.autograd.grad(losses / RECIPE.global_batch_size, parameters)
        for own, narrow, gradient in zip(single, half, found, strict=True):
            own += gradient.float()
            narrow += gradient
    return torch.cat([part.flatten() for part in single]), torch.cat([part.float().flatten() for part in half])


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


def test_bfloat16_accumulation_would_be_noticed(gradients: tuple[torch.Tensor, torch.Tensor]) -> None:
    assert error(gradients[1], gradients[0]) > 2.5 * LIMIT


RANKS_AND_STAGES = [(1, 1), (2, 2), (2, 3), (1, 2), (1, 3)]


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", mark_campaign(RANKS_AND_STAGES, RANKS_AND_STAGES[:3]))
def test_every_stage_accumulates_in_float32(
    layout: tuple[int, int], gradients: tuple[torch.Tensor, torch.Tensor]
) -> None:
    moved, logged = step_of(*layout, [])
    assert error(moved, gradients[0]) < LIMIT
    assert "accumulated" not in logged
    assert ("averages each micro-batch over 2 ranks in bf16" in logged) == (layout[0] > 1)


def test_a_deepspeed_file_may_say_otherwise_and_that_is_logged(
    tmp_path: Path, gradients: tuple[torch.Tensor, torch.Tensor]
) -> None:
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"data_types": {"grad_accum_dtype": "bf16"}}))
    moved, logged = step_of(1, 2, ["--deepspeed_config", str(path)])
    assert error(moved, gradients[0]) > LIMIT
    assert "gradients are accumulated in bf16" in logged
