"""The product of a column-parallel layer with tokens that are split over its ranks, gathered twice instead of kept.

The product needs the tokens of all ranks, and so does the gradient of its weight. What is kept for the latter is this
rank's tokens: they are gathered again in the backward pass, while the gradient of the input is computed, which is
summed while the gradient of the weight is.

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
    """`x W^T + b` for the tokens of all ranks.

    A program of torch.compile keeps the gathered tokens.

    Shapes: x `[b, s/t, i]`, weight `[o/t, i]`, bias `[o/t]`; result `[b, s, o/t]`.

    Args:
        queue: see `deferrable_linear`; weight and bias are parameters if there is one.
        float8: whether and how the products are in eight bits; tokens are gathered in the dtype they have.
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
        # Recomputation replaces saved tensors by detached ones, which take no gradient.
        ctx.parameters = (None, None) if queue is None else (weight, bias)
        return linear(gathered_tokens(x, axis), weight, bias, float8)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (x, weight), axis, queue = ctx.saved_tensors, ctx.axis, ctx.queue
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        is_later = queue is not None and queue.is_open
        gathering: PendingTokens | None = start_gathering(x, axis) if needs_weight and not is_later else None
        of_whole = input_gradient(gradient, weight, ctx.float8) if needs_x else None
        whole = None if gathering is None else gathering.wait()
        summing = None if of_whole is None else start_summing(of_whole, axis)

        def of_parameters() -> Gradients:
            of_weight = of_bias = None
            if needs_weight:
                tokens = gathered_tokens(x, axis) if whole is None else whole
                parameter = weight if queue is None else ctx.parameters[0]
                of_weight = gradient_or_none(queue, parameter, tokens, gradient, ctx.float8)
            if needs_bias:
                of_bias = gradient.flatten(0, -2).sum(0).to(ctx.bias_dtype)
            return of_weight, of_bias

        gradients = now_or_later(queue, ctx.parameters, of_parameters)
        return None if summing is None else summing.wait(), *gradients, None, None, None
