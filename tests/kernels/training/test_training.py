"""Training with compiled elementwise operations: the losses of torch's, with the same dropout masks."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.kernels.choice import Implementation, Kernels
from megatron.kernels.native.library import Library
from megatron.model.gpt import OUTPUT_LAYER
from megatron.model.interface.step_context import Recompute, StepSettings
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import SEED, build_gpt, forward, mean_loss, tiny_config

MESH = ParallelMesh.single()
SILU = {"activation_function": "silu", "gated_linear_unit": True, "residual_multiplier": 0.5}
SANDWICH = {"norm_placement": "sandwich", "bias_gelu_fusion": False}


def _losses(implementation: Implementation, recompute: Recompute, changes: dict[str, Any]) -> list[float]:
    """Losses of four steps of SGD."""
    kernels = Kernels(activation=implementation, dropout_add=implementation)
    config = tiny_config(hidden_dropout=0.1, attention_dropout=0.2, **changes)
    model = build_gpt(config, dataclasses.replace(MESH, kernels=kernels)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        tokens = torch.randint(0, 101, (3, 16), generator=torch.Generator().manual_seed(step))
        settings = StepSettings(seed=SEED, recompute=recompute)
        output = forward(model, tokens, torch.arange(3) + 3 * step, settings=settings)
        loss = mean_loss(output, tokens.roll(-1, dims=1), model.layer(OUTPUT_LAYER).axis)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("recompute", "changes"),
    [(Recompute.NONE, {}), (Recompute.BLOCKS, SILU), (Recompute.NONE, SANDWICH)],
)
def test_losses_do_not_depend_on_the_implementation(
    compiled: Library, recompute: Recompute, changes: dict[str, Any]
) -> None:
    expected = _losses(Implementation.TORCH, recompute, changes)
    found = _losses(Implementation.CSRC, Recompute.NONE, changes)
    assert max(abs(one / other - 1) for one, other in zip(found, expected, strict=True)) <= 1e-6
    assert _losses(Implementation.CSRC, recompute, changes) == found
