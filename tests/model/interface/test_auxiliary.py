"""Auxiliary losses are summed over layers; recomputation counts each once."""

from __future__ import annotations

import torch
from torch.utils.checkpoint import checkpoint

from megatron.model.interface.auxiliary import AuxiliaryLosses


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
