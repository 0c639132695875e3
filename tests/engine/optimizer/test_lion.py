"""Lion: one parameter at a time, as the paper's algorithm writes it."""

from __future__ import annotations

import torch
from torch import nn

from megatron.engine.optimizers.lion import Lion
from tests.engine.optimizer.dropped_steps import steps_with_a_twin


def test_updates_are_those_of_the_paper() -> None:
    """Algorithm 2 of arXiv 2302.06675, in float64."""
    weights = [nn.Parameter(torch.randn(5, 3, dtype=torch.float64)), nn.Parameter(torch.randn(7, dtype=torch.float64))]
    known = [weight.detach().clone() for weight in weights]
    momenta = [torch.zeros_like(weight) for weight in known]
    rate, first, second, decay = 0.03, 0.9, 0.99, 0.1
    optimizer = Lion([{"params": weights, "weight_decay": decay}], rate, (first, second))
    for _ in range(5):
        for number, weight in enumerate(weights):
            weight.grad = torch.randn_like(weight)
            direction = torch.sign(first * momenta[number] + (1 - first) * weight.grad)
            known[number] = known[number] - rate * (direction + decay * known[number])
            momenta[number] = second * momenta[number] + (1 - second) * weight.grad
        optimizer.step()
    for number, weight in enumerate(weights):
        assert torch.allclose(weight, known[number], rtol=1e-12, atol=1e-13)
        assert torch.allclose(optimizer.state[weight]["exp_avg"], momenta[number], rtol=1e-12, atol=1e-13)


def test_a_parameter_without_a_gradient_stays() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = Lion([{"params": [weight], "weight_decay": 0.5}], 0.1, (0.9, 0.99))
    optimizer.step()
    assert torch.equal(weight, torch.ones(2)) and not optimizer.state


def test_a_flag_keeps_a_step_from_changing_anything() -> None:
    def optimizer_of(weight: nn.Parameter) -> Lion:
        return Lion([{"params": [weight], "weight_decay": 0.5}], 0.1, (0.9, 0.99))

    for ours, theirs in steps_with_a_twin(optimizer_of):
        assert torch.equal(ours["exp_avg"], theirs.get("exp_avg", torch.zeros(6)))
