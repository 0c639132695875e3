"""Norms against their formulas in float64, forward and backward."""

from __future__ import annotations

import pytest
import torch

from megatron.kernels.norms import layer_norm, rms_norm

EPS = 1e-3


def _case(dtype: torch.dtype, *shape: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = 0.1 * torch.randn(*shape, generator=generator)
    weight, bias, gradient = (torch.randn(*part, generator=generator) for part in (shape[-1:], shape[-1:], shape))
    return [part.to(dtype).requires_grad_() for part in (x, weight, bias)] + [gradient.to(dtype)]


def _layer_formula(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, zero_centered: bool
) -> torch.Tensor:
    centred = x - x.mean(-1, keepdim=True)
    normalized = centred / (centred.square().mean(-1, keepdim=True) + EPS).sqrt()
    y = normalized * (1 + weight if zero_centered else weight)
    return y if bias is None else y + bias


def _rms_formula(x: torch.Tensor, weight: torch.Tensor, zero_centered: bool) -> torch.Tensor:
    normalized = x / (x.square().mean(-1, keepdim=True) + EPS).sqrt()
    return normalized * (1 + weight if zero_centered else weight)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("kind", ["layer", "layer without bias", "rms"])
def test_norms_equal_their_formulas(kind: str, zero_centered: bool, dtype: torch.dtype) -> None:
    results = []
    for precision in (torch.float64, dtype):
        x, weight, bias, gradient = (part.detach().to(precision).requires_grad_() for part in _case(dtype, 2, 5, 33))
        with_bias = bias if kind == "layer" else None
        if kind == "rms":
            reference, ours = (
                _rms_formula(x, weight, zero_centered),
                rms_norm(x, weight, EPS, zero_centered=zero_centered),
            )
        else:
            reference = _layer_formula(x, weight, with_bias, zero_centered)
            ours = layer_norm(x, weight + 1 if zero_centered else weight, with_bias, EPS)
        y = reference if precision == torch.float64 and not results else ours
        y.backward(gradient.detach())
        gradients = [x.grad, weight.grad, *([bias.grad] if with_bias is not None else [])]
        results.append([y.detach(), *gradients])
        assert all(part.dtype == precision for part in results[-1])
    tolerance = {torch.float64: 1e-10, torch.float32: 3e-5, torch.bfloat16: 5e-2}[dtype]
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.double(), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("zero_centered", [False, True])
def test_gradcheck_of_rms_norm(zero_centered: bool) -> None:
    x, weight, _, _ = _case(torch.float64, 3, 6)
    assert torch.autograd.gradcheck(lambda *both: rms_norm(*both, EPS, zero_centered=zero_centered), (x, weight))


def test_where_half_precision_is_rounded() -> None:
    x, weight, _, _ = _case(torch.bfloat16, 64, 32)
    wide = x.float() / (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()
    assert torch.equal(rms_norm(x, weight, EPS), wide.bfloat16() * weight)
    assert torch.equal(rms_norm(x, weight, EPS, zero_centered=True), (wide * (1 + weight.float())).bfloat16())


def test_large_half_precision_values_do_not_overflow() -> None:
    x = torch.full((1, 4), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(4, dtype=torch.float16), EPS), torch.ones_like(x))
