"""Training with the compiled softmax and rotation, dropout included, equals training without them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from megatron.kernels.attention.dense import explicit_attention
from megatron.kernels.choice import TORCH_KERNELS, Implementation, Kernels
from megatron.kernels.native.library import Library
from megatron.model.gpt import OUTPUT_LAYER
from megatron.model.interface.step_context import MaskKind, Recompute, StepSettings
from megatron.parallel.mesh import ParallelMesh
from tests.helpers.networks import SEED, build_gpt, forward, mean_loss, tiny_config

COMPILED = Kernels(softmax=Implementation.CSRC, rotary=Implementation.CSRC)
ROTARY = {"position_embedding_type": "rope", "num_query_groups": 2}
DOCUMENTS = StepSettings(seed=SEED, restart_positions=True, mask=MaskKind.DOCUMENTS)


def _losses(kernels: Kernels, changes: dict[str, Any], settings: StepSettings | None, steps: int = 3) -> list[float]:
    mesh = dataclasses.replace(ParallelMesh.single(), kernels=kernels)
    config = tiny_config(**{"hidden_dropout": 0.1, "attention_dropout": 0.2, "init_method_std": 0.2, **changes})
    model = build_gpt(config, mesh)
    model.train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(steps):
        tokens = torch.randint(0, 101, (3, 16), generator=torch.Generator().manual_seed(step))
        segments = (tokens % 5 == 0).cumsum(dim=1) if settings is DOCUMENTS else None
        logits = forward(model, tokens, torch.arange(3) + 7 * step, segments, settings=settings)
        loss = mean_loss(logits, tokens.roll(-1, dims=1), model.layer(OUTPUT_LAYER).axis)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize(
    ("changes", "settings"),
    [
        (ROTARY, DOCUMENTS),
        ({**ROTARY, "rotary_percent": 0.5, "rotary_interleaved": True, "attention_logit_softcap": 5.0}, None),
        ({**ROTARY, "qk_layernorm": True, "num_layers": 1}, StepSettings(seed=SEED, recompute=Recompute.ATTENTION)),
        ({**ROTARY, "attention_output_gate": True, "num_layers": 1}, None),
        ({"position_embedding_type": "alibi", "num_layers": 1}, None),
    ],
)
def test_training_gives_the_same_losses(
    compiled: Library, changes: dict[str, Any], settings: StepSettings | None
) -> None:
    expected = _losses(TORCH_KERNELS, changes, settings)
    assert _losses(COMPILED, changes, settings) == pytest.approx(expected, abs=1e-6, rel=1e-6)
    (without_dropout,) = _losses(COMPILED, {**changes, "attention_dropout": 0.0}, settings, steps=1)
    assert expected[0] != pytest.approx(without_dropout, abs=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("softcap", "causal"), [(None, True), (0.7, False)])
def test_attention_with_the_compiled_softmax(
    compiled: Library, dtype: torch.dtype, softcap: float | None, causal: bool
) -> None:
    generator = torch.Generator().manual_seed(2)
    shapes = ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8))
    heads = [torch.randn(shape, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    bias = torch.randn(2, 1, 5, 7, generator=generator).masked_fill(torch.rand(2, 1, 5, 7) < 0.3, float("-inf"))
    bias[1, 0, 2] = float("-inf")
    options = {"bias": bias, "causal": causal, "softcap": softcap}
    results = []
    for kernels, wide in ((COMPILED, False), (TORCH_KERNELS, False), (TORCH_KERNELS, True)):
        own = [head.detach().double().requires_grad_() for head in heads] if wide else heads
        y = explicit_attention(*own, 0.4, kernels=kernels, **options)
        gradient = torch.linspace(-1, 1, y.numel()).view(y.shape).to(y.dtype)
        results.append([y.detach(), *torch.autograd.grad(y, own, gradient)])
    for found, expected, exact in zip(*results, strict=True):
        own_error = (expected - exact).abs().max()
        assert found.dtype == dtype
        assert (found - exact).abs().max() <= 1.5 * own_error + torch.finfo(dtype).eps * exact.abs().max()
    assert not results[0][0][1, :, 2].any()
    halved = explicit_attention(*heads, 0.4, lambda x: x / 2, kernels=COMPILED, **options)
    torch.testing.assert_close(2 * halved, results[0][0])
