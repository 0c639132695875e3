"""The communication that split layers need, differentiable; each operator is the identity on an axis of size 1.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (the operators f and g and their conjugates).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Axis


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Passes a replicated tensor to ranks that each use it for their part of a matrix product.

    Forward does nothing; backward sums the ranks' gradients, in place: the result must feed one matrix product, whose
    backward makes a fresh gradient.
    """
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums the ranks' partial results: forward all-reduce, backward nothing.

    The sum replaces `x`, which must be the fresh result of an operation that does not need it for its own backward.
    """
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from(x: torch.Tensor, axis: Axis, dimension: int = -1) -> torch.Tensor:
    """Joins the ranks' parts along a dimension: forward all-gather, backward this rank's slice."""
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dimension)


def _summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    total = x.contiguous()
    dist.all_reduce(total, group=axis.group)
    return total


class _CopyTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # type: ignore[no-untyped-def]
        ctx.axis = axis
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _summed(gradient, ctx.axis), None


class _ReduceFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # type: ignore[no-untyped-def]
        total = _summed(x, axis)
        if total is x:
            ctx.mark_dirty(x)
        return total

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dimension):  # type: ignore[no-untyped-def]
        ctx.axis, ctx.dimension = axis, dimension
        own = x.contiguous()
        parts = [torch.empty_like(own) for _ in range(axis.size)]
        dist.all_gather(parts, own, group=axis.group)
        return torch.cat(parts, dim=dimension)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        width = gradient.shape[ctx.dimension] // ctx.axis.size
        return gradient.narrow(ctx.dimension, ctx.axis.rank * width, width).contiguous(), None, None
