"""Auxiliary losses: hidden states are unchanged, gradients are summed, recomputation counts once."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megatron.model.interface.auxiliary import AuxiliaryLosses


@pytest.mark.parametrize("scale", [1.0, 4096.0])
def test_the_gradient_is_that_of_main_loss_plus_auxiliary_loss(scale: float) -> None:
    weight = torch.randn(3, 3, requires_grad=True)
    x = torch.randn(5, 3)
    plain = x @ weight
    (plain.square().sum() + weight.abs().sum()).mul(scale).backward()
    expected, weight.grad = weight.grad, None
    losses = AuxiliaryLosses(scale)
    hidden = losses.attach(x @ weight, "balance", 0, weight.abs().sum())
    assert torch.equal(hidden, plain)
    hidden.square().sum().mul(scale).backward()
    torch.testing.assert_close(weight.grad, expected)
    assert losses.sums()["balance"].item() == pytest.approx(weight.abs().sum().item())
    assert not losses.sums()["balance"].requires_grad


def test_values_are_summed_over_layers_and_counted_once_under_recompute() -> None:
    losses = AuxiliaryLosses()
    weight = torch.ones(2, requires_grad=True)

    def layer(x: torch.Tensor, index: int) -> torch.Tensor:
        return losses.attach(x * weight, "balance", index, weight.sum() * (index + 1))

    hidden = torch.ones(2)
    for index in range(2):
        hidden = checkpoint(layer, hidden, index, use_reentrant=False)
    hidden.sum().backward()
    assert losses.sums()["balance"].item() == 6.0
    assert weight.grad.tolist() == [5.0, 5.0]  # 2 of the product, 1 + 2 of the attached losses
    assert AuxiliaryLosses().sums() == {}


def test_recorded_values_are_summed_and_have_no_gradient() -> None:
    losses = AuxiliaryLosses()
    for layer, tokens in enumerate(([3, 1], [2, 2])):
        losses.record("tokens", layer, torch.tensor(tokens, dtype=torch.float32, requires_grad=True))
    assert losses.sums()["tokens"].tolist() == [5.0, 3.0]
    assert not losses.sums()["tokens"].requires_grad
