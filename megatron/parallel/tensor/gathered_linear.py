"""A column-parallel product of tokens that are split over its ranks, gathered again in backward instead of saved.

The product and its weight gradient need the tokens of all ranks, but only this rank's are saved. The backward pass
overlaps gathering them with computing the input gradient, and summing the input gradient with computing the weight
gradient.

Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4.2.2.
"""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.float8 import Float8, input_gradient, linear
from megatron.parallel.mesh import Axis
from megatron.parallel.tensor.collectives import (
    PendingTokens,
    gather_sequence,
    gathered_tokens,
    start_gathering,
    start_summing,
)
from megatron.parallel.tensor.weight_gradients import Gradients, WeightGradientQueue, gradient_or_none, now_or_later


def gathered_linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    axis: Axis,
    queue: WeightGradientQueue | None = None,
    float8: Float8 | None = None,
) -> torch.Tensor:
    """`x W^T + b` for the tokens of all ranks; under torch.compile the gathered tokens are saved.

    Shapes: x `[b, s/t, i]`, weight `[o/t, i]`, bias `[o/t]`; result `[b, s, o/t]`.

    Args:
        queue: see `deferrable_linear`; weight and bias are parameters if there is one.
        float8: the settings of eight-bit products, if enabled; tokens are gathered in their own dtype.
    """
    if torch.compiler.is_compiling() or not torch.is_grad_enabled():
        return linear(gather_sequence(x, axis), weight, bias, float8)
    return _GatheredLinear.apply(x, weight, bias, axis, queue, float8)  # type: ignore[no-any-return]


class _GatheredLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, axis, queue, float8):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(x, weight)
        ctx.axis, ctx.queue, ctx.float8 = axis, queue, float8
        ctx.bias_dtype = None if bias is None else bias.dtype
        # Recomputation replaces saved tensors by detached ones, which cannot have a gradient.
        ctx.parameters = (None, None) if queue is None else (weight, bias)
        return linear(gathered_tokens(x, axis), weight, bias, float8)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x, weight), axis, queue = ctx.saved_tensors, ctx.axis, ctx.queue
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        is_later = queue is not None and queue.is_open
        gathering: PendingTokens | None = start_gathering(x, axis) if needs_weight and not is_later else None
        x_gradient = input_gradient(gradient, weight, ctx.float8) if needs_x else None
        whole = None if gathering is None else gathering.wait()
        summing = None if x_gradient is None else start_summing(x_gradient, axis)

        def parameter_gradients() -> Gradients:
            weight_gradient = bias_gradient = None
            if needs_weight:
                tokens = gathered_tokens(x, axis) if whole is None else whole
                parameter = weight if queue is None else ctx.parameters[0]
                weight_gradient = gradient_or_none(queue, parameter, tokens, gradient, ctx.float8)
            if needs_bias:
                bias_gradient = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype)
            return weight_gradient, bias_gradient

        gradients = now_or_later(queue, ctx.parameters, parameter_gradients)
        return None if summing is None else summing.wait(), *gradients, None, None, None
