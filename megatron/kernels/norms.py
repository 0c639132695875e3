"""Norms over the last dimension, also of a sum; statistics are in float32 even for half-precision input."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.choice import Implementation


def layer_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    zero_centered: bool = False,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """Layer norm, the result in the dtype of x.

    Shapes: x `[..., h]`, weight and bias `[h]`; result as x.

    Args:
        zero_centered: the weight is stored as its difference from 1.

    Source: Ba, Kiros, Hinton, "Layer normalization", 2016, equation 4.
    """
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.norm(x, weight, bias, eps, True, zero_centered)[0]  # type: ignore[no-any-return]
    scale = weight + 1 if zero_centered else weight
    return torch.layer_norm(x, scale.shape, scale, bias, eps)


def rms_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    *,
    zero_centered: bool = False,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """RMS norm, the result in the dtype of x.

    In half precision the normalized values are rounded before the product with the weight, as in Llama; with a
    zero-centered weight after it, as in Gemma.

    Shapes: x `[..., h]`, weight `[h]`; result as x.

    Args:
        zero_centered: the weight is stored as its difference from 1.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019, equation 4.
    """
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.norm(x, weight, None, eps, False, zero_centered)[0]  # type: ignore[no-any-return]
    if torch.is_grad_enabled():
        return _RMSNorm.apply(x, weight, eps, zero_centered)  # type: ignore[no-any-return]
    return _normalized(x, weight, eps, zero_centered)[0]


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    *,
    subtract_mean: bool,
    branch_bias: torch.Tensor | None = None,
    zero_centered: bool = False,
    implementation: Implementation = Implementation.TORCH,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`residual + (x + branch_bias)`, without the terms that are None, and its norm; compiled in one pass.

    In half precision the compiled form rounds the sum once, at the end, and sums the gradient of `branch_bias` from
    unrounded values, unless rows are too long for a GPU's registers.

    Shapes: x, residual and both results `[..., h]`; branch_bias `[h]`.

    Args:
        subtract_mean: True for the layer norm; False for the RMS norm, which has no bias.
        branch_bias: bias of the layer whose output is x.
    """
    if implementation is Implementation.CSRC and residual is not None and x.dtype is residual.dtype:
        operation = torch.ops.megatron.add_norm
        return operation(x, residual, weight, bias, branch_bias, eps, subtract_mean, zero_centered)[:2]  # type: ignore[no-any-return]
    if branch_bias is not None:
        x = x + branch_bias
    total = x if residual is None else residual + x
    if subtract_mean:
        normalized = layer_norm(total, weight, bias, eps, zero_centered=zero_centered, implementation=implementation)
    else:
        normalized = rms_norm(total, weight, eps, zero_centered=zero_centered, implementation=implementation)
    return total, normalized


def _normalized(
    x: torch.Tensor, weight: torch.Tensor, eps: float, zero_centered: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """The norm, and the inverse of the root mean square of each row.

    Shapes: x `[..., h]`; results `[..., h]` and `[..., 1]`.
    """
    wide = torch.promote_types(x.dtype, torch.float32)
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    inverse = length.square_().div_(x.shape[-1]).add_(eps).rsqrt_()  # [..., 1]
    normalized = x * inverse
    if zero_centered:
        return normalized.mul_(weight.to(wide) + 1).to(x.dtype), inverse
    return normalized.to(x.dtype).mul_(weight), inverse


class _RMSNorm(torch.autograd.Function):
    """Backward in few passes over x and the gradient; takes half the time of the composed operations on CPU."""

    @staticmethod
    def forward(ctx, x, weight, eps, zero_centered):  # type: ignore[no-untyped-def]
        result, inverse = _normalized(x, weight, eps, zero_centered)
        ctx.save_for_backward(x, weight, inverse)
        ctx.zero_centered = zero_centered
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        x, weight, inverse = ctx.saved_tensors
        size, wide = x.shape[-1], inverse.dtype
        scale = weight.to(wide) + 1 if ctx.zero_centered else weight.to(wide)
        rows, row_gradients = (part.reshape(-1, size).to(wide) for part in (x, gradient))  # [n, h]
        inverse = inverse.reshape(-1, 1)
        products = row_gradients * rows
        of_weight = (inverse.T @ products).view(size)
        shares = (products @ scale.unsqueeze(1)).mul_(inverse).mul_(inverse).div_(-size)  # [n, 1]
        of_x = torch.mul(row_gradients, scale, out=products).addcmul_(rows, shares).mul_(inverse)
        return of_x.to(x.dtype).view(x.shape), of_weight.to(weight.dtype), None, None


def register() -> None:
    """Registers the result shapes of the compiled operations with torch; once, after the library is loaded."""
    torch.library.register_fake("megatron::norm", _norm_shapes)
    torch.library.register_fake("megatron::add_norm", _add_norm_shapes)
    torch.library.register_fake("megatron::norm_backward", _backward_shapes)


def _norm_shapes(x, weight, bias, eps, subtract_mean, zero_centered):  # type: ignore[no-untyped-def]
    rows, wide = x.shape[:-1], torch.promote_types(x.dtype, torch.float32)
    mean = x.new_empty(rows if subtract_mean else (0,), dtype=wide)
    return x.new_empty(x.shape), mean, x.new_empty(rows, dtype=wide)


def _add_norm_shapes(x, residual, weight, bias, branch_bias, *settings):  # type: ignore[no-untyped-def]
    return x.new_empty(x.shape), *_norm_shapes(x, weight, bias, *settings)


def _backward_shapes(dy, total_gradient, x, weight, mean, inverse, zero_centered, has_bias, branch_dtype):  # type: ignore[no-untyped-def]
    of_bias = weight.new_empty(weight.shape if has_bias else (0,))
    of_branch_bias = weight.new_empty((0,) if branch_dtype is None else weight.shape, dtype=branch_dtype)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), of_bias, of_branch_bias
