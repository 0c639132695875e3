"""Linear layers and their gradients in eight bits, where that is asked for and the sizes allow it."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels import products
from megatron.kernels.float8.scaling import FORWARD_DTYPE, Float8, quantized, scaled_product

MULTIPLE = 16  # of which the kernels want the sizes of both factors, except for the rows of the first one


def linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, float8: Float8 | None = None
) -> torch.Tensor:
    """`x W^T + b`, in eight bits if `float8` says so and the sizes of the weight are multiples of 16.

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
    """The gradient of `linear`'s weight, in eight bits if the number of tokens is a multiple of 16 too.

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
    """Keeps its input as it came, as the product in more bits does: of the gradient of the weight the rows are others,
    and so are their scales.
    """

    @staticmethod
    def forward(ctx, x, weight, bias, float8):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype, ctx.float8 = None if bias is None else bias.dtype, float8
        rows = quantized(x.reshape(-1, x.shape[-1]), FORWARD_DTYPE, by_row=float8.by_row)
        columns = quantized(weight, FORWARD_DTYPE, by_row=float8.by_row)
        product = scaled_product(rows, columns, x.dtype, float8, bias=bias, is_forward=True)
        # As in torch's own product: autograd refuses that a view is summed over ranks in place.
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
