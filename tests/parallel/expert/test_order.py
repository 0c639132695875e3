"""Tokens are copied to the rows of their experts and added up again, with the derivatives of an index."""

from __future__ import annotations

import pytest
import torch

from megatron.parallel.expert.order import ExpertOrder, Slots

EXPERTS = torch.tensor([[2, 0], [0, 1], [0, 2]])


def test_rows_lie_by_expert_and_by_token() -> None:
    order = ExpertOrder.of(EXPERTS, 4)
    assert order.tokens.tolist() == [0, 1, 2, 1, 0, 2]
    assert (order.counts.tolist(), order.ends.tolist()) == ([3, 1, 2, 0], [3, 4, 6, 6])  # type: ignore[union-attr]
    assert order.tokens[order.positions].tolist() == [[0, 0], [1, 1], [2, 2]]
    assert order.kept_weights(weights := torch.rand(3, 2)) is weights


def test_a_capacity_gives_every_expert_as_many_rows() -> None:
    slots = Slots(torch.tensor([[0, 2], [0, 0], [1, 1]]), capacity=2)  # expert 0 drops token 0
    order = ExpertOrder.of(EXPERTS, 4, slots)
    assert order.ends is None and order.counts.tolist() == [3, 1, 2, 0] and len(order.tokens) == 4 * 2
    assert order.positions[slots.kept].tolist() == [4, 0, 2, 1, 5]
    assert order.tokens[[4, 0, 2, 1, 5]].tolist() == [0, 1, 1, 2, 2]
    assert order.kept_weights(torch.ones(3, 2)).tolist() == [[1, 0], [1, 1], [1, 1]]


@pytest.mark.parametrize("slots", [None, Slots(torch.tensor([[0, 2], [0, 0], [1, 1]]), 2)], ids=["all", "capacity"])
def test_derivatives_are_those_of_an_index(slots: Slots | None) -> None:
    order = ExpertOrder.of(EXPERTS, 4, slots)
    kept = torch.ones(3, 2) if slots is None else slots.kept.float()
    tokens, weights, factors = (
        torch.randn(shape, generator=torch.Generator().manual_seed(1)).requires_grad_() for shape in ((3, 5), (3, 2), 5)
    )
    order.combine(order.spread(tokens) * factors, order.kept_weights(weights)).square().sum().backward()
    found = [tensor.grad for tensor in (tokens, weights, factors)]
    plain = [tensor.detach().requires_grad_() for tensor in (tokens, weights, factors)]
    ((plain[1] * kept).sum(dim=1, keepdim=True) * plain[0] * plain[2]).square().sum().backward()
    for gradient, tensor in zip(found, plain, strict=True):
        torch.testing.assert_close(gradient, tensor.grad)
