"""Differentiable collectives for tensor-parallel layers; each is the identity on an axis of size 1.

Under torch.compile they are torch's functional collectives, which it can trace; these are not timed.

Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (the operators f and g and their conjugates).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import _functional_collectives as functional

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import wait_for


def copy_to(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Passes a replicated tensor to a column-parallel matrix product.

    Forward is the identity; backward all-reduces the gradient in place, so the result must be used by a single matrix
    product, whose backward allocates a new gradient.
    """
    return x if axis.size == 1 else _CopyTo.apply(x, axis)


def reduce_from(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums the ranks' partial results: all-reduce in forward, identity in backward.

    The sum overwrites `x`, which must be the result of an operation that does not need it for its own backward.
    """
    return x if axis.size == 1 else _ReduceFrom.apply(x, axis)


def gather_from(x: torch.Tensor, axis: Axis, dimension: int = -1) -> torch.Tensor:
    """Concatenates the ranks' shards along a dimension: all-gather in forward, this rank's slice in backward."""
    return x if axis.size == 1 else _GatherFrom.apply(x, axis, dimension)


def scatter_to(x: torch.Tensor, axis: Axis, dimension: int = -1) -> torch.Tensor:
    """A copy of this rank's shard of a replicated tensor; backward all-gathers the ranks' gradients."""
    return x if axis.size == 1 else _ScatterTo.apply(x, axis, dimension)


def gather_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Gathers the tokens of all ranks for a column-parallel matrix product.

    All-gather in forward; reduce-scatter in backward, as every rank has a partial gradient of every token.

    Shapes: `[b, s/t, ...]` to `[b, s, ...]`.

    Source: Korthikanti et al., "Reducing activation recomputation in large transformer models", 2022, section 4.2.2
    (the operators g and g bar).
    """
    return x if axis.size == 1 else _GatherSequence.apply(x, axis)


def scatter_sequence(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Sums the ranks' partial results and returns this rank's tokens: the conjugate of `gather_sequence`.

    Shapes: `[b, s, ...]` to `[b, s/t, ...]`.
    """
    return x if axis.size == 1 else _ScatterSequence.apply(x, axis)


def _summed(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    if torch.compiler.is_compiling():
        return functional.all_reduce(x.contiguous(), "sum", axis.group)  # type: ignore[arg-type]
    total = x.contiguous()
    with axis.timed():
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
        return _gathered(x, axis, dimension)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _shard(gradient, ctx.axis, ctx.dimension), None, None


class _ScatterTo(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis, dimension):  # type: ignore[no-untyped-def]
        ctx.axis, ctx.dimension = axis, dimension
        return _shard(x, axis, dimension)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _gathered(gradient, ctx.axis, ctx.dimension), None, None


class _GatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # type: ignore[no-untyped-def]
        ctx.axis = axis
        return gathered_tokens(x, axis)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return summed_tokens(gradient, ctx.axis), None


class _ScatterSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, axis):  # type: ignore[no-untyped-def]
        ctx.axis = axis
        return summed_tokens(x, axis)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gathered_tokens(gradient, ctx.axis), None


def gathered_tokens(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The tokens of all ranks, in order, without derivatives. Shapes: `[b, s/t, ...]` to `[b, s, ...]`."""
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(x.contiguous(), 1, axis.group)  # type: ignore[arg-type]
    return start_gathering(x, axis).wait()


def summed_tokens(x: torch.Tensor, axis: Axis) -> torch.Tensor:
    """The sum over the ranks of this rank's tokens, without derivatives. Shapes: `[b, s, ...]` to `[b, s/t, ...]`."""
    if torch.compiler.is_compiling():
        return functional.reduce_scatter_tensor(x.contiguous(), "sum", 1, axis.group)  # type: ignore[arg-type]
    return start_summing(x, axis).wait()


class PendingTokens(NamedTuple):
    """A message in transit, overlapped with computation.

    Attributes:
        sent: held until the message has arrived.
        received: the receive buffer.
        is_gathered: `received` has the tokens of the ranks one after the other, `[t * b, s/t, ...]`.
    """

    work: dist.Work
    axis: Axis
    sent: torch.Tensor
    received: torch.Tensor
    is_gathered: bool

    def wait(self) -> torch.Tensor:
        """Returns the gathered tokens or the sum; only this wait is timed."""
        wait_for([self.work], self.axis)
        if not self.is_gathered:
            return self.received
        return self.received.unflatten(0, (self.axis.size, -1)).movedim(0, 1).flatten(1, 2)  # a view if b is 1


def start_gathering(x: torch.Tensor, axis: Axis) -> PendingTokens:
    """Starts `gathered_tokens`."""
    sent = x.contiguous()
    parts = sent.new_empty(axis.size * sent.shape[0], *sent.shape[1:])
    work = dist.all_gather_into_tensor(parts, sent, group=axis.group, async_op=True)
    return PendingTokens(work, axis, sent, parts, is_gathered=True)


def start_summing(x: torch.Tensor, axis: Axis) -> PendingTokens:
    """Starts `summed_tokens`."""
    parts = x.unflatten(1, (axis.size, -1)).movedim(1, 0).contiguous()  # a view if b is 1
    total = torch.empty_like(parts[0])
    work = dist.reduce_scatter_tensor(total, parts.flatten(0, 1), group=axis.group, async_op=True)
    return PendingTokens(work, axis, parts, total, is_gathered=False)


def start_all_reduce(x: torch.Tensor, axis: Axis) -> PendingTokens:
    """Starts to sum a tensor over the ranks, in place if it is contiguous."""
    total = x.contiguous()
    work = dist.all_reduce(total, group=axis.group, async_op=True)
    return PendingTokens(work, axis, total, total, is_gathered=False)


def _gathered(x: torch.Tensor, axis: Axis, dimension: int) -> torch.Tensor:
    shard = x.contiguous()
    if torch.compiler.is_compiling():
        return functional.all_gather_tensor(shard, dimension % shard.ndim, axis.group)  # type: ignore[arg-type]
    parts = [torch.empty_like(shard) for _ in range(axis.size)]
    with axis.timed():
        dist.all_gather(parts, shard, group=axis.group)
    return torch.cat(parts, dim=dimension)


def _shard(x: torch.Tensor, axis: Axis, dimension: int) -> torch.Tensor:
    width = x.shape[dimension] // axis.size
    return x.narrow(dimension, axis.rank * width, width).clone(memory_format=torch.contiguous_format)
