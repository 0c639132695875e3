"""Embedding lookup in a vocabulary shard; ids of other shards give zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from megatron.kernels.choice import Implementation


def lookup(
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    first_row: int = 0,
    is_whole: bool = True,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """Looks up the rows of ids.

    Gradients of equal ids are summed in float32 even in half precision: rounded to bfloat16 after each addition, the
    sum over a frequent token would stop growing. The compiled form adds them in the order of their positions, so that
    sums do not depend on the number or order of threads.

    Shapes: weight `[v/t, h]`, ids `[...]` int64; result `[..., h]`.

    Args:
        first_row: the id of the shard's first row.
        is_whole: True if the shard has a row for every id.
    """
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.embedding(weight, ids, first_row)  # type: ignore[no-any-return]
    if is_whole:
        return _looked_up(weight, ids - first_row if first_row else ids)
    local = ids - first_row
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = _looked_up(weight, local.masked_fill(foreign, 0))  # [..., h]
    return rows.masked_fill(foreign.unsqueeze(-1), 0.0)


def _looked_up(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    if weight.dtype in (torch.bfloat16, torch.float16) and weight.requires_grad and torch.is_grad_enabled():
        return _Float32Sums.apply(weight, ids)  # type: ignore[no-any-return]
    return F.embedding(ids, weight)


class _Float32Sums(torch.autograd.Function):
    """A lookup in half precision whose gradient is summed in float32, only for ids that occur."""

    @staticmethod
    def forward(ctx, weight, ids):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(ids)
        ctx.rows = weight.shape[0]
        return F.embedding(ids, weight)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (ids,) = ctx.saved_tensors
        flat, rows = ids.reshape(-1), gradient.reshape(-1, gradient.shape[-1])  # [n], [n, h]
        result = rows.new_zeros(ctx.rows, rows.shape[1])
        if not flat.numel():
            return result, None
        ordered, positions = flat.sort()
        is_next = ordered.diff(prepend=ordered[:1]).ne_(0)
        group = torch.empty_like(flat).scatter_(0, positions, is_next.cumsum(0))  # index among the distinct ids
        most = min(len(flat), ctx.rows)
        sums = torch.ops.aten.embedding_dense_backward(rows.float(), group, most, -1, False)
        # All positions of an id write its sum: the number of distinct ids is only available on the device.
        return result.index_copy_(0, flat, sums.to(rows.dtype)[group]), None


def register() -> None:
    """Registers the result shapes of the compiled operation with torch; once, after the library is loaded."""
    torch.library.register_fake(
        "megatron::embedding", lambda weight, ids, first_row: weight.new_empty((*ids.shape, weight.shape[1]))
    )
    torch.library.register_fake(
        "megatron::embedding_backward",
        lambda gradient, ids, rows, first_row: gradient.new_empty((rows, gradient.shape[-1])),
    )
