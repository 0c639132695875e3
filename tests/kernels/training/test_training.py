"""Training with compiled operations: the losses of torch's, with the same dropout masks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.kernels.choice import TORCH_KERNELS, Implementation, Kernels
from megatron.kernels.native.library import Library
from megatron.model.gpt import OUTPUT_LAYER
from megatron.model.interface.step_context import MaskKind, Recompute, StepSettings
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import SEED, build_gpt, forward, mean_loss, tiny_config

MESH = ParallelMesh.single()
SILU = {"activation_function": "silu", "gated_linear_unit": True, "residual_multiplier": 0.5}
ROTARY = {"position_embedding_type": "rope", "num_query_groups": 2}
DOCUMENTS = StepSettings(seed=SEED, restart_positions=True, mask=MaskKind.DOCUMENTS)
COMPILED = Kernels(**dict.fromkeys(("activation", "dropout_add", "norm", "softmax", "rotary"), Implementation.CSRC))
SANDWICH = {"norm_placement": "sandwich", "bias_gelu_fusion": False}


def _losses(kernels: Kernels, changes: dict[str, Any], settings: StepSettings) -> list[float]:
    """Losses of three steps of SGD."""
    config = tiny_config(**{"hidden_dropout": 0.1, "attention_dropout": 0.2, **changes})
    model = build_gpt(config, dataclasses.replace(MESH, kernels=kernels)).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(3):
        tokens = torch.randint(0, 101, (3, 16), generator=torch.Generator().manual_seed(step))
        segments = (tokens % 5 == 0).cumsum(dim=1) if settings.needs_segments else None
        output = forward(model, tokens, torch.arange(3) + 7 * step, segments, settings=settings)
        loss = mean_loss(output, tokens.roll(-1, dims=1), model.layer(OUTPUT_LAYER).axis)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize(
    ("recompute", "changes"),
    [
        (Recompute.NONE, {}),
        (Recompute.BLOCKS, SILU),
        (Recompute.NONE, SANDWICH),
        (Recompute.NONE, {**ROTARY, "rotary_percent": 0.5, "rotary_interleaved": True, "attention_logit_softcap": 5.0}),
        (Recompute.ATTENTION, {**ROTARY, "qk_layernorm": True, "num_layers": 1}),
        (Recompute.NONE, {**ROTARY, "attention_output_gate": True, "num_layers": 1}),
        (Recompute.NONE, {"position_embedding_type": "alibi", "num_layers": 1}),
        (None, ROTARY),  # documents
    ],
)
def test_losses_do_not_depend_on_the_implementation(
    compiled: Library, recompute: Recompute | None, changes: dict[str, Any]
) -> None:
    changes = {"init_method_std": 0.2, **changes} if "position_embedding_type" in changes else changes
    settings = DOCUMENTS if recompute is None else StepSettings(seed=SEED, recompute=recompute)
    expected = _losses(TORCH_KERNELS, changes, settings)
    assert _losses(COMPILED, changes, settings) == pytest.approx(expected, rel=1e-6, abs=1e-6)
    without_dropout = _losses(COMPILED, {**changes, "attention_dropout": 0.0}, settings)
    assert expected[0] != pytest.approx(without_dropout[0], abs=1e-5)


class _Counter(TorchDispatchMode):
    """Counts the calls of each operation."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[object] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.calls[function] += 1
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("changes", "recompute", "fewer"),
    [
        ({}, Recompute.NONE, 4),  # of two blocks, attention and feed-forward
        ({}, Recompute.BLOCKS, 2),  # a block that is recomputed adds what its feed-forward returns itself
        ({"normalization": "RMSNorm"}, Recompute.NONE, 4),
        ({"norm_placement": "post"}, Recompute.NONE, 4),
        ({"apply_residual_connection_post_layernorm": True}, Recompute.NONE, 4),
        ({"parallel_residual": True}, Recompute.NONE, 2),  # no norm follows attention
        ({"norm_placement": "sandwich"}, Recompute.NONE, 0),  # a norm of the branch alone lies between
        ({"residual_multiplier": 0.5}, Recompute.NONE, 0),
        ({"hidden_dropout": 0.1}, Recompute.NONE, 0),
        ({"add_bias_linear": False}, Recompute.NONE, 0),
    ],
)
def test_compiled_norms_sum_the_gradients_of_biases_before_them(
    compiled: Library, changes: dict[str, Any], recompute: Recompute, fewer: int
) -> None:
    config = tiny_config(**{"hidden_dropout": 0.0, "attention_dropout": 0.0, **changes})
    model = build_gpt(config, dataclasses.replace(MESH, kernels=Kernels(norm=Implementation.CSRC))).train()
    for parameter in model.parameters():
        if parameter.dim() == 1:  # biases begin as zeros
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(2))
    tokens = torch.randint(0, 101, (3, 16), generator=torch.Generator().manual_seed(1))
    results, sums = [], []
    for holds_parameters in (False, True):
        settings = StepSettings(seed=SEED, recompute=recompute, holds_parameters=holds_parameters)
        output = forward(model, tokens, torch.arange(3), settings=settings)
        loss = mean_loss(output, tokens.roll(-1, dims=1), model.layer(OUTPUT_LAYER).axis)
        with _Counter() as counter:
            results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
        sums.append(counter.calls[torch.ops.aten.sum.dim_IntList])
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert sums[0] - sums[1] == fewer
    with torch.no_grad():
        torch.testing.assert_close(forward(model, tokens, torch.arange(3), settings=settings), output.detach())


@pytest.mark.parametrize(
    ("changes", "joined"),
    [({}, 2), ({"num_query_groups": 2}, 2), ({"num_query_groups": 1}, 2), ({"add_bias_linear": False}, 0)],
)
def test_gradients_of_a_projection_are_joined_with_its_bias(
    compiled: Library, changes: dict[str, Any], joined: int
) -> None:
    config = tiny_config(hidden_dropout=0.0, attention_dropout=0.0, **changes)
    tokens = torch.randint(0, 101, (3, 16), generator=torch.Generator().manual_seed(1))
    results, joins = [], []
    for implementation in (Implementation.TORCH, Implementation.CSRC):
        model = build_gpt(config, dataclasses.replace(MESH, kernels=Kernels(rotary=implementation))).train()
        with _Counter() as counter:
            loss = mean_loss(forward(model, tokens, torch.arange(3)), tokens, model.layer(OUTPUT_LAYER).axis)
            results.append([loss.detach(), *torch.autograd.grad(loss, list(model.parameters()))])
        joins.append(counter.calls)
    for found, expected in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    assert [calls[torch.ops.megatron.join_heads.default] for calls in joins] == [0, joined]
