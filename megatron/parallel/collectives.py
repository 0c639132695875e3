"""The four communications a network needs, differentiable; each takes an axis and is the identity on one of size 1.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (the operators f and g and their conjugates).
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Axis


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Hands a replicated tensor to ranks that each use it for their part: forward nothing, backward sums the
    gradients."""
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums the ranks' partial results: forward all-reduce, backward nothing."""
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from(x: torch.Tensor, axis: Axis, dimension: int = -1) -> torch.Tensor:
    """Joins the ranks' parts along a dimension: forward all-gather, backward this rank's slice."""
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dimension)


def scatter_to(x: torch.Tensor, axis: Axis, dimension: int = -1) -> torch.Tensor:
    """Takes this rank's slice of a replicated tensor along a dimension: backward all-gather."""
    return x if axis.size == 1 else _ScatterTo.apply(x, axis, dimension)


def _summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=axis.group)
    return total


def _joined(x: torch.Tensor, axis: Axis, dimension: int) -> torch.Tensor:
    own = x.contiguous()
    parts = [torch.empty_like(own) for _ in range(axis.size)]
    dist.all_gather(parts, own, group=axis.group)
    return torch.cat(parts, dim=dimension)


def _own_slice(x: torch.Tensor, axis: Axis, dimension: int) -> torch.Tensor:
    width = x.shape[dimension] // axis.size
    return x.narrow(dimension, axis.rank * width, width).contiguous()


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
        return _summed(x, axis)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient, None


class _GatherFrom(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dimension):  # type: ignore[no-untyped-def]
        ctx.axis, ctx.dimension = axis, dimension
        return _joined(x, axis, dimension)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _own_slice(gradient, ctx.axis, ctx.dimension), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dimension):  # type: ignore[no-untyped-def]
        ctx.axis, ctx.dimension = axis, dimension
        return _own_slice(x, axis, dimension)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _joined(gradient, ctx.axis, ctx.dimension), None, None
