"""FP8 products: values and scales against an independent computation, torch's product against the emulation."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F

from megatron.kernels import products
from megatron.kernels.float8 import FORWARD_DTYPE, Float8, linear, quantized

E5M2 = torch.float8_e5m2
EMULATED = Float8(is_emulated=True)
FORMS = [Float8(dtype, by_row) for dtype in (FORWARD_DTYPE, E5M2) for by_row in (False, True)]
# Bits of the mantissa, the least exponent of a normal number, and the largest number.
# Source: Open Compute Project, "8-bit Floating Point Specification", 2023.
FORMATS = {FORWARD_DTYPE: (3, -6, 448.0), E5M2: (2, -14, 57344.0)}


def rounded(value: float, dtype: torch.dtype, largest: float) -> tuple[float, float]:
    """A value in the format, scaled, and what it is divided by: in Python's arithmetic, half to even."""
    mantissa, least, maximum = FORMATS[dtype]
    scale = 2.0 ** math.floor(math.log2(maximum / largest))
    exponent = max(least, math.frexp(value * scale)[1] - 1) if value else least
    step = 2.0 ** (exponent - mantissa)
    return round(value * scale / step) * step, 1 / scale


def drawn(*shape: int, size: float = 1.0, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(shape, generator=generator)).bfloat16()


@pytest.mark.parametrize("by_row", [False, True], ids=["whole", "rows"])
@pytest.mark.parametrize("dtype", FORMATS, ids=str)
@pytest.mark.parametrize("size", [1.0, 3e-5, 7e4])
def test_values_and_scales(size: float, dtype: torch.dtype, by_row: bool) -> None:
    matrix = drawn(16, 32, size=size)
    matrix *= torch.logspace(0, -4, 16).bfloat16().unsqueeze(1)  # rows of other sizes, the last ones subnormal
    matrix[3, 5], matrix[:, 7] = 0.0, matrix.abs().amax()
    values, inverse = quantized(matrix, dtype, by_row=by_row)
    assert values.dtype is dtype and inverse.shape == ((16, 1) if by_row else ())
    for row, found, factors in zip(matrix, values.float(), inverse.expand(16, 1), strict=True):
        largest = float((row if by_row else matrix).abs().max())
        expected = [rounded(float(value), dtype, largest) for value in row]
        assert list(zip(found.tolist(), factors.expand(32).tolist(), strict=True)) == expected


@pytest.mark.parametrize("dtype", FORMATS, ids=str)
def test_extremes_leave_the_range_of_a_scale_and_no_overflow_is_lost(dtype: torch.dtype) -> None:
    for by_row in (False, True):
        for value in (0.0, 1e-38):
            values, inverse = quantized(torch.full((16, 16), value).bfloat16(), dtype, by_row=by_row)
            assert (values.float() * inverse).abs().max() <= 2 * value and inverse.isfinite().all()
        for bad in (torch.inf, torch.nan):
            matrix = drawn(16, 16)
            matrix[2, 3] = bad
            values, inverse = quantized(matrix, dtype, by_row=by_row)
            is_lost = (values.float() * inverse).isnan()
            assert is_lost[2].all() and (is_lost.all() if not by_row else is_lost.sum() == 16)


def with_gradients(float8: Float8 | None, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None,
                   gradient: torch.Tensor) -> list[torch.Tensor]:  # fmt: skip
    leaves = [part.clone().requires_grad_() for part in (x, weight, bias) if part is not None]
    y = linear(leaves[0], leaves[1], leaves[2] if bias is not None else None, float8)
    return [y.detach(), *torch.autograd.grad(y, leaves, gradient)]


@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.gradient_dtype}-{'rows' if form.by_row else 'whole'}")
@pytest.mark.parametrize("has_bias", [True, False])
def test_torchs_product_equals_the_emulation(form: Float8, has_bias: bool) -> None:
    """The products of a GPU, computed by torch on the CPU."""
    bias = drawn(48, size=0.02) if has_bias else None
    inputs = (drawn(2, 32, 64), drawn(48, 64, size=0.02, seed=2), bias, drawn(2, 32, 48, size=1e-4, seed=3))
    try:
        found = with_gradients(form, *inputs)
    except (RuntimeError, NotImplementedError) as failure:
        pytest.skip(f"torch {torch.__version__} has no such product on a CPU: {str(failure)[:80]}")
    emulated = with_gradients(dataclasses.replace(form, is_emulated=True), *inputs)
    exact = with_gradients(None, *inputs)
    for one, other, known in zip(found, emulated, exact, strict=True):
        # Sums in another order may round to the next bfloat16.
        torch.testing.assert_close(one, other, rtol=2**-7, atol=1e-3 * float(known.float().abs().max()))
        assert (other != known).any() or known.dim() == 1  # the gradient of the bias is a sum
        apart = (other.float() - known.float()).norm() / known.float().norm()
        assert apart < 0.07


def test_parts_of_a_matrix_sum_to_its_product() -> None:
    """Ranks choose the scales of their own parts: powers of two, so values are rounded alike."""
    x, weight = drawn(32, 64).float(), drawn(16, 64, size=0.02, seed=2).float()
    weight[:, 32:] *= 10  # a part with another scale
    whole = linear(x, weight, None, EMULATED)
    parts = [linear(x[:, own], weight[:, own], None, EMULATED) for own in (slice(32), slice(32, None))]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-5, atol=1e-5)


def test_shapes_that_the_kernels_do_not_take_are_multiplied_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, gradient = drawn(2, 8, 24), drawn(16, 24, seed=2), drawn(2, 8, 16, seed=3)
    plain = with_gradients(None, x, weight, None, gradient)
    for one, other in zip(with_gradients(Float8(), x, weight, None, gradient), plain, strict=True):
        assert torch.equal(one, other)
    for form, tokens in ((EMULATED, 12), (dataclasses.replace(EMULATED, has_weight_gradients=False), 16)):
        x, weight, gradient = drawn(tokens, 32), drawn(16, 32, seed=2), drawn(tokens, 16, seed=3)
        y, of_x, of_weight = with_gradients(form, x, weight, None, gradient)
        assert torch.equal(of_weight, products.weight_gradient(x, gradient, weight.dtype))
        assert not torch.equal(y, F.linear(x, weight)) and not torch.equal(of_x, gradient @ weight)


@pytest.mark.gpu
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.gradient_dtype}-{'rows' if form.by_row else 'whole'}")
def test_products_of_a_gpu(form: Float8) -> None:
    """Within rounding of the emulation, whatever the order of sums; Hopper keeps fewer bits of those of activations."""
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of 8 bits")
    inputs = (drawn(8, 128, 512), drawn(1024, 512, size=0.02, seed=2), drawn(1024, size=0.02, seed=5))
    inputs = tuple(part.cuda() for part in (*inputs, drawn(8, 128, 1024, size=1e-4, seed=3)))
    found, emulated = (with_gradients(dataclasses.replace(form, is_emulated=each), *inputs) for each in (False, True))
    for one, other in zip(found, emulated, strict=True):
        assert (one.float() - other.float()).norm() < 5e-3 * other.float().norm()


@pytest.mark.gpu
def test_nothing_waits_for_the_gpu() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU has no products of 8 bits")
    inputs = [part.cuda() for part in (drawn(64, 64), drawn(32, 64, seed=2), drawn(32, seed=5), drawn(64, 32, seed=3))]
    for form in FORMS:
        with_gradients(form, *inputs)
        torch.cuda.set_sync_debug_mode("error")
        try:
            with_gradients(form, *inputs)
        finally:
            torch.cuda.set_sync_debug_mode("default")
