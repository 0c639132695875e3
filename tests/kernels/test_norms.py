"""Norms against their formulas in float64, forward and backward, and the compiled ones against torch's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.native.library import Library
from megatron.kernels.norms import add_norm, layer_norm, rms_norm

CSRC = Implementation.CSRC
KINDS = ("layer", "layer without bias", "rms")

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
@pytest.mark.parametrize("kind", KINDS)
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


def test_where_half_precision_is_rounded() -> None:
    x, weight, _, _ = _case(torch.bfloat16, 64, 32)
    wide = x.float() / (x.float().square().mean(-1, keepdim=True) + EPS).sqrt()
    assert torch.equal(rms_norm(x, weight, EPS), wide.bfloat16() * weight)
    assert torch.equal(rms_norm(x, weight, EPS, zero_centered=True), (wide * (1 + weight.float())).bfloat16())


def test_large_half_precision_values_do_not_overflow() -> None:
    x = torch.full((1, 4), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(x, torch.ones(4, dtype=torch.float16), EPS), torch.ones_like(x))


def _run(
    kind: str, zero_centered: bool, parts: list[torch.Tensor], implementation: Implementation, is_added: bool = False
) -> list[torch.Tensor]:
    """The norm, with `is_added` of twice x and a bias, and the gradients of its arguments."""
    x, weight, bias = (part.detach().requires_grad_() for part in parts[:3])
    options = {"zero_centered": zero_centered, "implementation": implementation}
    leaves = [x, weight] + ([bias] if kind == "layer" else [])
    with_bias = bias if kind == "layer" else None
    if is_added:
        residual, branch_bias = x.detach().clone().requires_grad_(), parts[2].detach().flip(0).requires_grad_()
        leaves += [residual, branch_bias]
        options["branch_bias"] = branch_bias
        subtract_mean = kind != "rms"
        shift = with_bias if subtract_mean else None
        total, y = add_norm(x, residual, weight, shift, EPS, subtract_mean=subtract_mean, **options)
        results, gradients = [y, total], [parts[3], 0.5 * parts[3]]
    else:
        y = rms_norm(x, weight, EPS, **options) if kind == "rms" else layer_norm(x, weight, with_bias, EPS, **options)
        results, gradients = [y], [parts[3]]
    return [part.detach() for part in (*results, *torch.autograd.grad(results, leaves, gradients))]


def test_compiled_rms_norm_rounds_where_the_reference_does(compiled: Library) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        x, weight, _, _ = _case(dtype, 64, 512)
        for weights, zero_centered in ((weight, False), (weight, True), (weight.float() + 0.1, False)):
            expected = rms_norm(x, weights, EPS, zero_centered=zero_centered)
            found = rms_norm(x, weights, EPS, zero_centered=zero_centered, implementation=CSRC)
            assert found.dtype == dtype and (found == expected).float().mean() > 0.999
    large = torch.full((1, 4), 60000.0, dtype=torch.float16)
    assert torch.equal(rms_norm(large, torch.ones(4), EPS, implementation=CSRC), torch.ones_like(large))


def test_compiled_takes_mixed_dtypes(compiled: Library) -> None:
    parts = _case(torch.float32, 6, 40)
    x, weight, bias, gradient = (part.detach() for part in parts)
    half = [x.bfloat16(), weight, bias.half(), gradient.bfloat16()]
    y, of_x, of_weight, of_bias = _run("layer", True, half, CSRC)
    assert [part.dtype for part in (y, of_x, of_weight, of_bias)] == [
        *2 * [torch.bfloat16],
        torch.float32,
        torch.float16,
    ]
    reference = _run("layer", True, [part.double() for part in half], Implementation.TORCH)
    for one, other in zip(reference, (y, of_x, of_weight, of_bias), strict=True):
        torch.testing.assert_close(other.double(), one, atol=1e-2, rtol=1e-2)
    with torch.autocast("cpu", torch.bfloat16):
        assert layer_norm(half[0], weight, None, EPS, implementation=CSRC).dtype == torch.bfloat16
    total, y = _add_rms(x.bfloat16(), x, weight)  # a residual of another dtype
    assert torch.equal(total, x + x.bfloat16()) and y.dtype == torch.float32
    for shape in ((0, 8), (3, 0)):
        results = _run(
            "layer", False, [torch.ones(shape), torch.ones(shape[1]), torch.ones(shape[1]), torch.ones(shape)], CSRC
        )
        assert results[0].shape == shape and not results[2].any()


def test_torch_knows_the_compiled_norms(compiled: Library) -> None:
    x, weight, bias, gradient = _case(torch.float64, 3, 5)
    plain = [part.detach() for part in (x, weight, bias)]
    for subtracts_mean, shift in ((True, bias), (False, None)):
        settings = (EPS, subtracts_mean, True)
        if subtracts_mean:
            torch.library.opcheck(torch.ops.megatron.norm.default, (x, weight, shift, *settings))
        else:
            given = (x, x.detach(), weight, shift, bias, *settings)
            torch.library.opcheck(torch.ops.megatron.add_norm.default, given)
        _, *statistics = torch.ops.megatron.norm(*plain, *settings)
        gradients = (gradient, gradient, *plain[:2], *statistics, True, shift is not None)
        for branch_dtype in (None, torch.float32):
            torch.library.opcheck(torch.ops.megatron.norm_backward.default, (*gradients, branch_dtype))
        branch_bias = plain[2].clone().requires_grad_()
        leaves = [part for part in (x, gradient.requires_grad_(), branch_bias, weight, shift) if part is not None]

        def both(x: torch.Tensor, residual: torch.Tensor, *others: torch.Tensor) -> tuple[torch.Tensor, ...]:
            branch_bias, scale, offset = (*others, None)[:3]
            return torch.ops.megatron.add_norm(x, residual, scale, offset, branch_bias, *settings)[:2]  # noqa: B023

        assert torch.autograd.gradcheck(both, leaves)
        gradient = gradient.detach()
    total = _add_rms(x, x, weight, bias)[0]
    of_total, of_branch_bias = torch.autograd.grad(total.sum(), (x, bias))  # the norm itself is not used
    assert torch.equal(of_total, torch.full_like(x, 2)) and torch.equal(of_branch_bias, torch.full_like(bias, 3))
    with pytest.raises(NotImplementedError, match="first derivatives only.*--kernels norm=torch"):
        torch.autograd.grad(rms_norm(x, weight, EPS, implementation=CSRC).sum(), x, create_graph=True)


def _add_rms(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, branch_bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    settings: dict[str, Any] = {"branch_bias": branch_bias, "implementation": CSRC}
    return add_norm(x, residual, weight, None, EPS, subtract_mean=False, **settings)


def test_bias_of_a_branch(compiled: Library) -> None:
    x, weight, bias, gradient = _case(torch.bfloat16, 70, 96)
    branch_bias = bias.detach().float().flip(0).requires_grad_()
    residual = x.detach().flip(0).requires_grad_()
    total, y = _add_rms(x, residual, weight, branch_bias)
    once = (x.float() + branch_bias + residual.float()).bfloat16()
    assert torch.equal(total, once)  # rounded at the end only
    expected = torch.autograd.grad(_add_rms(once, torch.zeros_like(once), weight), (once,), [gradient] * 2)[0]
    leaves = (x, residual, weight, branch_bias)
    wanted = torch.autograd.grad((total, y), leaves, [gradient] * 2, retain_graph=True)
    assert torch.equal(wanted[0], wanted[1]) and torch.equal(wanted[0], expected)
    assert wanted[3].dtype == torch.float32
    torch.testing.assert_close(wanted[3], wanted[0].double().sum(0).float(), atol=0.1, rtol=0)
    for place, leaf in enumerate(leaves):  # alone, or all others: the same bits
        for parts in ((leaf,), leaves[:place] + leaves[place + 1 :]):
            frozen = [part.detach().requires_grad_(any(part is one for one in parts)) for part in leaves]
            results = _add_rms(*frozen)
            places = [index for index, part in enumerate(frozen) if part.requires_grad]
            found = torch.autograd.grad(results, [frozen[index] for index in places], [gradient] * 2)
            assert all(torch.equal(one, wanted[index]) for one, index in zip(found, places, strict=True))
    with torch.no_grad():
        assert torch.equal(_add_rms(x, residual, weight, branch_bias)[1], y)
