"""Schedule-free AdamW: its three sequences, as the paper's algorithm writes them."""

from __future__ import annotations

import torch
from torch import nn

from megatron.engine.optimizers.schedule_free import IterateMeans, ScheduleFree
from tests.engine.optimizer.dropped_steps import steps_with_a_twin

BETAS, EPSILON, DECAY = (0.9, 0.95), 1e-8, 0.1


def optimizer_of(*weights: nn.Parameter, power: float = 2.0) -> ScheduleFree:
    return ScheduleFree([{"params": list(weights), "weight_decay": DECAY, "eps": EPSILON}], 0.03, BETAS, power)


def test_the_sequences_are_those_of_the_paper() -> None:
    """Algorithm 1 of arXiv 2405.15682 with a warm-up, in float64: each of x, y and z is kept, and none is derived."""
    for power in (0.0, 2.0):
        weights = [nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in ((5, 3), (7,))]
        y = [weight.detach().clone() for weight in weights]
        x, z, v = [each.clone() for each in y], [each.clone() for each in y], [torch.zeros_like(each) for each in y]
        optimizer = optimizer_of(*weights, power=power)
        means = IterateMeans(optimizer, weights)
        total = 0.0
        for step, rate in enumerate((0.0, 0.01, 0.02, 0.03, 0.03, 0.03), start=1):
            optimizer.param_groups[0]["lr"] = rate
            total += rate**power
            share = rate**power / total if total else 0.0
            for number, weight in enumerate(weights):
                weight.grad = torch.randn_like(weight)
                v[number] = BETAS[1] * v[number] + (1 - BETAS[1]) * weight.grad**2
                direction = weight.grad / ((v[number] / (1 - BETAS[1] ** step)).sqrt() + EPSILON)
                z[number] = z[number] - rate * (direction + DECAY * y[number])
                x[number] = (1 - share) * x[number] + share * z[number]
                y[number] = (1 - BETAS[0]) * z[number] + BETAS[0] * x[number]
            optimizer.step()
            for number, weight in enumerate(weights):
                assert torch.allclose(weight, y[number], rtol=1e-6, atol=1e-8)
                mean = means.of(weight, 2, 4)
                assert torch.allclose(mean, x[number].view(-1)[2:6], rtol=1e-6, atol=1e-8)
        before = [weight.detach().clone() for weight in weights]
        means.exchange()
        assert all(torch.allclose(*pair, rtol=1e-6, atol=1e-8) for pair in zip(weights, x, strict=True))
        assert sum(each.numel() for each in means.means) == sum(each.numel() for each in weights)
        means.exchange()
        assert all(torch.equal(*pair) for pair in zip(weights, before, strict=True)) and not means.means
        assert optimizer.state[weights[0]]["weight"] == total


def test_a_parameter_without_a_gradient_stays() -> None:
    weight = nn.Parameter(torch.ones(2))
    optimizer = optimizer_of(weight)
    optimizer.step()
    assert torch.equal(weight, torch.ones(2)) and not optimizer.state
    assert torch.equal(IterateMeans(optimizer, [weight]).of(weight, 0, 2), torch.ones(2))


def test_a_flag_keeps_a_step_from_changing_anything() -> None:
    for ours, theirs in steps_with_a_twin(optimizer_of):
        for name, values in theirs.items():
            assert torch.equal(ours[name], values), name


def test_the_mean_goes_on_from_a_weight() -> None:
    """A resumed optimizer gives the next iterate the share that it would have had."""
    weight, twin = (nn.Parameter(torch.linspace(-1, 1, 6)) for _ in range(2))
    ours, theirs = optimizer_of(weight), optimizer_of(twin)
    total = 0.0
    for _ in range(3):
        weight.grad = torch.ones(6)
        ours.step()
        total += ours.weight_of(0.03)
    theirs.resume(twin, total)  # before it has a state
    twin.data.copy_(weight.data)
    theirs.state[twin].update({name: ours.state[weight][name].clone() for name in ("distance", "exp_avg_sq", "step")})
    for optimizer, each in ((ours, weight), (theirs, twin)):
        each.grad = torch.ones(6)
        optimizer.step()
    assert torch.equal(weight, twin) and ours.state[weight]["weight"] == theirs.state[twin]["weight"]
