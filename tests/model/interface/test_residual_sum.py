"""The last addition of a block, left to the next layer's norm: the same numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.model.blocks.norm import NoNorm
from megatron.model.interface.network import LayerStack
from megatron.model.interface.residual_sum import as_sum, total
from megatron.model.interface.step_context import Recompute, StepSettings
from tests.helpers.networks import SEED, build_gpt, tiny_config

NETWORKS: dict[str, dict[str, Any]] = {
    "pre": {},
    "RMS": {"normalization": "RMSNorm"},
    "parallel": {"parallel_residual": True},
    "residual after norm": {"apply_residual_connection_post_layernorm": True},
    "sandwich": {"norm_placement": "sandwich"},
    "post": {"norm_placement": "post"},
    "branches": {"norm_placement": "post_branch"},
    "multiplier": {"residual_multiplier": 0.5},
    "dropout": {"hidden_dropout": 0.1},
}


def _layer_by_layer(model: LayerStack, tokens: torch.Tensor, settings: StepSettings) -> torch.Tensor:
    """Each layer as it is alone: every block adds its residual itself."""
    hidden, context = tokens, settings.context(torch.arange(3))
    for _, layer in model.named_layers():
        hidden = layer(hidden, context)
        assert isinstance(hidden, torch.Tensor)
    return hidden


def _results(model: LayerStack, *, alone: bool, recompute: Recompute = Recompute.NONE) -> list[torch.Tensor]:
    """The logits and all gradients."""
    tokens = torch.randint(0, 101, (3, 16), generator=torch.Generator().manual_seed(1))
    settings = StepSettings(seed=SEED, recompute=recompute)
    if alone:
        logits = _layer_by_layer(model, tokens, settings)
    else:
        logits = model(tokens, settings.context(torch.arange(3)))
    weights = torch.linspace(-1, 1, logits.numel()).view(logits.shape)
    return [logits.detach(), *torch.autograd.grad(logits, list(model.parameters()), weights)]


@pytest.mark.parametrize("recompute", [Recompute.NONE, Recompute.BLOCKS])
@pytest.mark.parametrize("name", NETWORKS)
def test_numbers_are_those_of_the_layers_alone(name: str, recompute: Recompute) -> None:
    model = build_gpt(tiny_config(**{"hidden_dropout": 0.0, "attention_dropout": 0.0, **NETWORKS[name]})).train()
    expected = _results(model, alone=True)
    for found, alone in zip(_results(model, alone=False, recompute=recompute), expected, strict=True):
        assert torch.equal(found, alone)


def test_a_sum_is_normed_or_added_up() -> None:
    branch, residual = torch.randn(2, 1, 3, 4)
    context, bias = StepSettings().context(torch.arange(1)), torch.arange(4.0)
    rows, *nothing = as_sum(branch, context)
    assert nothing == [None, None] and torch.equal(rows, branch[0]) and NoNorm().add(rows, None) == (rows, rows)
    assert torch.equal(context.by_sample(total(rows, residual[0])), residual + branch)
    assert torch.equal(total(branch, residual, bias), residual + (branch + bias))
    assert as_sum((branch, residual, bias), context) == (branch, residual, bias)


def test_a_stack_without_layers_hands_on_what_it_gets() -> None:
    """That of a teacher on the stages of a pipeline that hold none of its layers."""
    hidden = torch.ones(2, 3)
    assert LayerStack([])(hidden, StepSettings(seed=SEED).context(torch.arange(2))) is hidden
