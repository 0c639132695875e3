"""From the gradients of backward passes to the update, without DeepSpeed."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.gradient_owner import GradientOwner
from megatron.engine.gradients.loss_scale import LossScale, ScaleRule
from megatron.engine.gradients.main_gradients import MainGradients
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.kernels.optimizer import build_adamw
from megatron.parallel.mesh import ParallelMesh
from tests.engine.engine_runs import step_figures

MESH = ParallelMesh.single()
RATE = 0.5


def owned(limit: float) -> tuple[GradientOwner, torch.optim.Optimizer, list[nn.Parameter]]:
    """An owner of two parameters in half precision, and an optimizer of their fp32 master."""
    flat = torch.zeros(6, dtype=torch.float16)
    parameters = [nn.Parameter(flat[:3]), nn.Parameter(flat[3:5])]
    master = nn.Parameter(flat.float())
    group = FlatGroup.of(parameters, flat)
    averaging = Averaging(MESH.gradient, torch.float32)
    gradients = MainGradients([torch.zeros(6)], [group], lambda _: True, averaging)
    optimizer = torch.optim.SGD([master], lr=RATE)
    return (
        GradientOwner(gradients, Clipping(limit, MESH.model, MESH.device), parameters, overlaps=True),
        optimizer,
        parameters,
    )


def step(limit: float, scale: float) -> tuple[float, torch.Tensor, torch.Tensor]:
    """The norm of a step of two backward passes, what it moved, and the copy of the weights in half precision."""
    owner, optimizer, (first, second) = owned(limit)
    for factor in (1.0, 2.0):
        (scale * factor * (first.sum() - second.sum())).backward()
        owner.accumulate()
    assert first.grad is None and second.grad is None
    assert owner._sum.of(second).tolist() == [-3.0 * scale] * 2
    assert len(list(owner.sums())) == 2
    owner.reduce()
    assert [part.tolist() for part in owner.reduced_gradients()] == [[3.0 * scale] * 3 + [-3.0 * scale] * 2 + [0.0]]
    loss_scale = None if scale == 1.0 else LossScale(scale, ScaleRule(1, 1, 1.0, refills=False), MESH.device)
    norm = owner.measure(loss_scale)
    gate = UpdateGate(MESH, spike_deviations=None, allows_overflow=True)
    gate.begin(lambda: step_figures(1.0, norm))
    copy = torch.zeros(6, dtype=torch.float16)
    assert owner.update(optimizer, gate, norm, [[copy]], loss_scale)
    assert loss_scale is None or float(loss_scale.value) == scale
    return float(norm), optimizer.param_groups[0]["params"][0].detach(), copy


@pytest.mark.parametrize("scale", [1.0, 1024.0])
@pytest.mark.parametrize("limit", [0.0, 1.0])
def test_the_scale_of_the_loss_moves_nothing(scale: float, limit: float) -> None:
    norm, moved, copy = step(limit, scale)
    assert norm == pytest.approx(45**0.5)
    factor = limit / norm if limit else 1.0
    assert moved.tolist() == pytest.approx([-RATE * 3 * factor] * 3 + [RATE * 3 * factor] * 2 + [0.0], rel=1e-5)
    assert torch.equal(copy, moved.half())


def test_an_optimizer_with_gradients_of_its_own_gets_copies() -> None:
    owner, optimizer, (first, second) = owned(0.0)
    master = optimizer.param_groups[0]["params"][0]
    master.grad = own = torch.zeros(6)
    (first.sum() + second.sum()).backward()
    owner.accumulate([first])
    owner.accumulate([second])
    owner.reduce()
    norm = owner.measure()
    gate = UpdateGate(MESH, spike_deviations=None, allows_overflow=False)
    gate.begin(lambda: step_figures(1.0, norm))
    assert owner.update(optimizer, gate, norm, ())
    assert master.grad is own and own.tolist() == [1.0] * 5 + [0.0]


def test_padding_stays_zero_after_a_bad_step() -> None:
    """NaN in it would reach the optimizer's state with the next good step."""
    owner, _, (first, second) = owned(1.0)
    master = nn.Parameter(torch.zeros(6))
    optimizer = build_adamw([{"params": [master], "eps": 1e-8, "weight_decay": 0.0}], lr=RATE, betas=(0.9, 0.9))
    gate = UpdateGate(MESH, spike_deviations=None, allows_overflow=False, on_device=True)
    for factor in (math.nan, math.inf, 1.0):
        (factor * (first.sum() - second.sum())).backward()
        owner.accumulate()
        owner.reduce()
        norm = owner.measure()
        gate.begin(lambda norm=norm: step_figures(1.0, norm))
        assert owner.update(optimizer, gate, norm, ())
        assert master.grad is not None and float(master.grad[5]) == 0.0
        owner._sum.clear()
    moments = [optimizer.state[master][name].tolist() for name in ("exp_avg", "exp_avg_sq")]
    assert [values[5] for values in moments] == [0.0, 0.0] and torch.tensor(moments).isfinite().all()
    assert master.detach().tolist() == pytest.approx([-RATE] * 3 + [RATE] * 2 + [0.0], rel=1e-4)
