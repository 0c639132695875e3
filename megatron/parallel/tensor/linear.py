"""Matrix products whose backward pass can defer weight gradients, and overlaps messages with the products of gradients.

For a column-parallel product the input gradient is summed over the ranks while the weight gradient is computed. With
sequence parallelism the product and its weight gradient need the tokens of all ranks, but only this rank's are saved:
the backward pass gathers them again while it computes the input gradient.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4.2.2;
NVIDIA/Megatron-LM `megatron/core/tensor_parallel/layers.py`, `LinearWithGradAccumulationAndAsyncCommunication`.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels import products
from megatron.kernels.float8 import Float8, input_gradient, linear
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor import collectives
from megatron.parallel.tensor.weight_gradients import Gradients, WeightGradientQueue, gradient_or_none, now_or_later


def deferrable_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    queue: WeightGradientQueue | None,
    float8: Float8 | None = None,
) -> torch.Tensor:
    """`x W^T + b`, whose backward pass defers the gradients of weight and bias while the queue is open.

    With a queue, weight and bias are parameters. Shapes: as `megatron.kernels.float8.linear`.
    """
    if queue is not None and torch.is_grad_enabled():
        return _Linear.apply(x, weight, bias, queue, float8, None, False)  # type: ignore[no-any-return]
    return products.linear(x, weight, bias) if float8 is None else linear(x, weight, bias, float8)


def column_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    axis: Axis,
    queue: WeightGradientQueue | None = None,
    float8: Float8 | None = None,
    *,
    splits_sequence: bool = False,
) -> torch.Tensor:
    """`deferrable_linear` with the outputs split over the axis; under torch.compile no message overlaps.

    Shapes: x `[..., i]`, weight `[o/t, i]`, bias `[o/t]`; result `[..., o/t]`.

    Args:
        splits_sequence: each rank has its own tokens of x, `[b, s/t, i]`; the result has all tokens, `[b, s, o/t]`.
    """
    is_plain = axis.size == 1 or torch.compiler.is_compiling() or not torch.is_grad_enabled()
    if not is_plain and (splits_sequence or axis.overlaps):
        return _Linear.apply(x, weight, bias, queue, float8, axis, splits_sequence)  # type: ignore[no-any-return]
    whole = collectives.gather_sequence(x, axis) if splits_sequence else collectives.copy_to(x, axis)
    return deferrable_linear(whole, weight, bias, queue, float8)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, queue, float8, axis, splits_sequence):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight if queue is None else None)
        # Recomputation replaces saved tensors by detached ones, which cannot have a gradient.
        ctx.parameters = (None, None) if queue is None else (weight, bias)
        ctx.queue, ctx.float8, ctx.axis, ctx.splits_sequence = queue, float8, axis, splits_sequence
        ctx.bias_dtype = None if bias is None else bias.dtype
        return linear(collectives.gathered_tokens(x, axis) if splits_sequence else x, weight, bias, float8)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x, weight), queue, axis = ctx.saved_tensors, ctx.queue, ctx.axis
        weight = ctx.parameters[0] if weight is None else weight
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gathers = ctx.splits_sequence and needs_weight
        is_later = queue is not None and queue.is_open
        gathering = collectives.start_gathering(x, axis) if gathers and not is_later else None
        x_gradient = input_gradient(gradient, weight, ctx.float8) if needs_x else None
        whole = None if gathering is None else gathering.wait()
        start = collectives.start_summing if ctx.splits_sequence else collectives.start_all_reduce
        summing = None if x_gradient is None or axis is None else start(x_gradient, axis)

        def parameter_gradients() -> Gradients:
            weight_gradient = bias_gradient = None
            if needs_weight:
                tokens = whole if whole is not None else collectives.gathered_tokens(x, axis) if gathers else x
                weight_gradient = gradient_or_none(queue, weight, tokens, gradient, ctx.float8)
            if needs_bias:
                bias_gradient = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype)
            return weight_gradient, bias_gradient

        gradients = now_or_later(queue, ctx.parameters, parameter_gradients)
        return x_gradient if summing is None else summing.wait(), *gradients, None, None, None, None
