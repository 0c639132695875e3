"""FP8 matrix products: both factors are scaled into the range of a float8 format, rounded, and multiplied with sums in
float32; the result is scaled back. Linear layers and their gradients use them with `--fp8-format`, if sizes allow.

Scales are the largest powers of two that keep all values in range: multiplying by them is exact, so a value is
rounded once, and alike with any scale that does not make it subnormal. They are computed from the present values
("current scaling") on the device, without synchronizing and without a history.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, for the formats and the tensors that use them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron.config import PrecisionConfig
from megatron.config.sections.computation import HYBRID, ROWWISE
from megatron.kernels import products

FORWARD_DTYPE = torch.float8_e4m3fn
MULTIPLE = 16  # divisor that kernels require of all sizes of the factors, except the rows of the first
# Lower bound of a tensor's largest value, so that its scale is finite and zeros stay zeros.
_SMALLEST = 2.0**-100
_EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class Float8:
    """The settings of a layer's FP8 products.

    Attributes:
        gradient_dtype: dtype of output gradients; activations and weights are in `FORWARD_DTYPE`.
        by_row: one scale per row of a factor, instead of one per factor.
        has_weight_gradients: compute gradients of weights in FP8, too.
        is_emulated: multiply the rounded factors in float32, on any device.
    """

    gradient_dtype: torch.dtype = torch.float8_e5m2
    by_row: bool = False
    has_weight_gradients: bool = True
    is_emulated: bool = False

    @classmethod
    def of(cls, precision: PrecisionConfig) -> Float8:
        """The settings of a run with `--fp8-format`."""
        return cls(
            gradient_dtype=torch.float8_e5m2 if precision.fp8_format == HYBRID else FORWARD_DTYPE,
            by_row=precision.fp8_recipe == ROWWISE,
            has_weight_gradients=precision.fp8_wgrad,
            is_emulated=precision.fp8_emulation,
        )


class Quantized(NamedTuple):
    """A factor of a product.

    Attributes:
        values: `[r, k]` in float8, contiguous.
        inverse: inverse of the scale, float32, `[]` or `[r, 1]`.
    """

    values: torch.Tensor
    inverse: torch.Tensor


def quantized(matrix: torch.Tensor, dtype: torch.dtype, *, by_row: bool) -> Quantized:
    """Rounds a matrix to float8, with one scale or one per row.

    All values that share their scale with an infinite value or NaN become NaN, so that no overflow is lost.

    Shapes: `[r, k]`.
    """
    dimension = 1 if by_row else None
    largest = torch.linalg.vector_norm(matrix, torch.inf, dim=dimension, keepdim=by_row, dtype=torch.float32).clamp_min(
        _SMALLEST
    )
    # Clearing the mantissa of a float gives the power of two at or below it.
    exponent = (torch.finfo(dtype).max / largest).view(torch.int32) & _EXPONENT_BITS
    scale = torch.where(largest.isfinite(), exponent.view(torch.float32), torch.nan)
    return Quantized((matrix * scale.to(matrix.dtype)).to(dtype).contiguous(), scale.reciprocal())


def scaled_product(
    a: Quantized,
    b: Quantized,
    dtype: torch.dtype,
    float8: Float8,
    *,
    bias: torch.Tensor | None = None,
    is_forward: bool = False,
) -> torch.Tensor:
    """`a b^T + bias`, rounded once.

    Args:
        is_forward: allow Hopper's faster sums in fewer bits, accurate enough for activations but not for gradients.

    Shapes: a `[m, k]`, b `[n, k]`, bias `[n]`; result `[m, n]`.
    """
    if float8.is_emulated:
        total = a.values.float() @ b.values.float().t()
        total = total.mul_(a.inverse).mul_(b.inverse.t())
        return (total if bias is None else total.add_(bias)).to(dtype)
    return torch._scaled_mm(
        a.values,
        b.values.t(),
        scale_a=a.inverse,
        scale_b=b.inverse.t(),
        bias=bias,
        out_dtype=dtype,
        use_fast_accum=is_forward,
    )


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, float8: Float8 | None = None
) -> torch.Tensor:
    """`x W^T + b`, in FP8 with `float8` if the sizes of the weight are multiples of 16.

    Shapes: x `[..., i]`, weight `[o, i]`, bias `[o]`; result `[..., o]`.
    """
    if float8 is None or not _are_multiples(*weight.shape):
        return products.linear(x, weight, bias)
    return _Float8Linear.apply(x, weight, bias, float8)  # type: ignore[no-any-return]


def input_gradient(gradient: torch.Tensor, weight: torch.Tensor, float8: Float8 | None = None) -> torch.Tensor:
    """The gradient of `linear`'s input. Shapes: gradient `[..., o]`, weight `[o, i]`; result `[..., i]`."""
    if float8 is None or not _are_multiples(*weight.shape):
        return products.input_gradient(gradient, weight)
    rows = quantized(gradient.reshape(-1, gradient.shape[-1]), float8.gradient_dtype, by_row=float8.by_row)
    columns = quantized(weight.t(), FORWARD_DTYPE, by_row=float8.by_row)
    return scaled_product(rows, columns, gradient.dtype, float8).unflatten(0, gradient.shape[:-1])


def weight_gradient(
    x: torch.Tensor, gradient: torch.Tensor, dtype: torch.dtype, float8: Float8 | None = None
) -> torch.Tensor:
    """The gradient of `linear`'s weight, in FP8 if the number of tokens is a multiple of 16, too.

    Shapes: x `[..., i]`, gradient `[..., o]`; result `[o, i]`.
    """
    rows = gradient.numel() // max(1, gradient.shape[-1])
    if (
        float8 is None
        or not float8.has_weight_gradients
        or rows == 0
        or not _are_multiples(rows, x.shape[-1], gradient.shape[-1])
    ):
        return products.weight_gradient(x, gradient, dtype)
    of_outputs = quantized(gradient.reshape(rows, -1).t(), float8.gradient_dtype, by_row=float8.by_row)
    of_inputs = quantized(x.reshape(rows, -1).t(), FORWARD_DTYPE, by_row=float8.by_row)
    return scaled_product(of_outputs, of_inputs, gradient.dtype, float8).to(dtype)


def _are_multiples(*sizes: int) -> bool:
    return all(size % MULTIPLE == 0 for size in sizes)


class _Float8Linear(torch.autograd.Function):
    """Keeps its input unrounded: the weight gradient needs other rows, and so other scales."""

    @staticmethod
    def forward(ctx, x, weight, bias, float8):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype, ctx.float8 = None if bias is None else bias.dtype, float8
        rows = quantized(x.reshape(-1, x.shape[-1]), FORWARD_DTYPE, by_row=float8.by_row)
        columns = quantized(weight, FORWARD_DTYPE, by_row=float8.by_row)
        product = scaled_product(rows, columns, x.dtype, float8, bias=bias, is_forward=True)
        # As in torch's product: autograd rejects an in-place sum over ranks of a view.
        return torch.ops.aten._unsafe_view(product, [*x.shape[:-1], weight.shape[0]])

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        of_x = input_gradient(gradient, weight, ctx.float8) if needs_x else None
        of_weight = weight_gradient(x, gradient, weight.dtype, ctx.float8) if needs_weight else None
        of_bias = gradient.reshape(-1, gradient.shape[-1]).sum(0).to(ctx.bias_dtype) if needs_bias else None
        return of_x, of_weight, of_bias, None
