"""The gradient norm and the clip factor, beside torch's."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.engine.gradients.clipping import Clipping
from megatron.parallel.mesh import ParallelMesh

MESH = ParallelMesh.single()
SIZES = ((3, 5), (70_001,), (7,))


def gradients(factor: float = 1.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, generator=generator) * factor for size in SIZES]


def clipping(limit: float) -> Clipping:
    return Clipping(limit, MESH.model, MESH.device)


@pytest.mark.parametrize("factor", [1e-4, 1.0])
def test_what_torch_clips_is_clipped_alike(factor: float) -> None:
    ours, theirs = gradients(factor), [torch.nn.Parameter(torch.zeros(size)) for size in SIZES]
    for parameter, gradient in zip(theirs, gradients(factor), strict=True):
        parameter.grad = gradient
    expected = torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    norm = clipping(1.0).norm(ours)
    scale = clipping(1.0).factor(norm)
    assert norm.dtype == torch.float64 and float(norm) == pytest.approx(float(expected), rel=1e-6)
    assert scale is not None and scale.dtype == torch.float32 and (float(scale) == 1.0) is (factor < 1)
    torch._foreach_mul_(ours, scale)
    for gradient, parameter in zip(ours, theirs, strict=True):
        torch.testing.assert_close(gradient, parameter.grad, rtol=1e-6, atol=0)


def test_without_a_limit_there_is_no_factor() -> None:
    assert clipping(0.0).factor(torch.tensor(9.0)) is None


def test_the_norm_of_nothing_is_zero_and_of_nan_is_nan() -> None:
    assert float(clipping(1.0).norm([])) == 0.0
    assert math.isnan(float(clipping(1.0).norm([torch.tensor([1.0, math.nan])])))


def test_many_elements_keep_their_digits() -> None:
    """A float32 sum of the squares would be a thousandth off."""
    many = torch.randn(1 << 22, generator=torch.Generator().manual_seed(1)) + 3.0
    exact = float(torch.dot(many.double(), many.double()).sqrt())
    assert float(clipping(1.0).norm([many])) == pytest.approx(exact, rel=1e-12)
