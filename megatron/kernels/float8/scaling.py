"""Products of matrices in eight bits: both factors are scaled into the range of a float8 format and rounded to it,
multiplied with sums in float32, and the result is scaled back.

Scales are powers of two, the largest with which no value leaves the range: multiplying by them rounds nothing, so a
value is rounded once, and in the same way under any scale that does not make it subnormal. They come from the values at
hand ("current scaling"), on the device: nothing waits for the host, and no history is kept.

Source: Micikevicius et al., "FP8 Formats for Deep Learning", 2022, for the formats and which tensors take which.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from megatron.config import PrecisionConfig
from megatron.config.sections.computation import HYBRID, ROWWISE

FORWARD_DTYPE = torch.float8_e4m3fn
# Below it the largest value of a tensor counts as this: its scale is finite, and zeros stay zeros.
_SMALLEST = 2.0**-100
_EXPONENT_BITS = 0x7F800000  # of a float32


@dataclass(frozen=True)
class Float8:
    """How the products of a layer are computed in eight bits.

    Attributes:
        gradient_dtype: of the gradients of outputs; activations and weights are in `FORWARD_DTYPE`.
        by_row: whether every row of a factor has its own scale, not the factor as a whole.
        has_weight_gradients: whether gradients of weights are computed in eight bits too.
        is_emulated: whether the rounded factors are multiplied in float32, on any device.
    """

    gradient_dtype: torch.dtype = torch.float8_e5m2
    by_row: bool = False
    has_weight_gradients: bool = True
    is_emulated: bool = False

    @classmethod
    def of(cls, precision: PrecisionConfig) -> Float8:
        """How the flags of a run with `--fp8-format` want them."""
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
        inverse: what they are multiplied by, float32, `[]` or `[r, 1]`.
    """

    values: torch.Tensor
    inverse: torch.Tensor


def quantized(matrix: torch.Tensor, dtype: torch.dtype, *, by_row: bool) -> Quantized:
    """Rounds a matrix to float8, as a whole or each row with a scale of its own.

    Where a value is infinite or not a number, all that share its scale become NaN, so that an overflow is not lost.

    Shapes: `[r, k]`.
    """
    dimension = 1 if by_row else None
    largest = torch.linalg.vector_norm(matrix, torch.inf, dim=dimension, keepdim=by_row, dtype=torch.float32).clamp_min(
        _SMALLEST
    )
    # Without its mantissa a float is the power of two at or below it.
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
        is_forward: whether sums may be kept in fewer bits, which Hopper GPUs do faster: enough for activations, too few
            for gradients.

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
