"""Lookup of token ids in a vocabulary shard; ids of other shards give zeros."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron.kernels.choice import Implementation


def lookup(
    weight: torch.Tensor,
    ids: torch.Tensor,
    *,
    first_row: int = 0,
    is_whole: bool = True,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """The rows of some ids.

    The compiled gradient adds the rows of equal ids in the order of their positions, in float32 also for half
    precision: it does not depend on the number of threads, and on a GPU not on the order in which they run.

    Shapes: weight `[v/t, h]`, ids `[...]` int64; result `[..., h]`.

    Args:
        first_row: the id of the shard's first row.
        is_whole: whether the shard has a row for every id.
    """
    if implementation is Implementation.CSRC:
        return torch.ops.megatron.embedding(weight, ids, first_row)  # type: ignore[no-any-return]
    if is_whole:
        return F.embedding(ids - first_row if first_row else ids, weight)
    local = ids - first_row
    foreign = (local < 0) | (local >= weight.shape[0])
    rows = F.embedding(local.masked_fill(foreign, 0), weight)  # [..., h]
    return rows.masked_fill(foreign.unsqueeze(-1), 0.0)


def register() -> None:
    """Tells torch the shapes and the gradient of the compiled operation; once, after the library is loaded."""
    torch.library.register_fake(
        "megatron::embedding", lambda weight, ids, first_row: weight.new_empty((*ids.shape, weight.shape[1]))
    )
    torch.library.register_fake(
        "megatron::embedding_backward",
        lambda gradient, ids, rows, first_row: gradient.new_empty((rows, gradient.shape[-1])),
    )
    torch.library.register_autograd("megatron::embedding", _backward, setup_context=_keep)


def _keep(ctx, inputs, output):  # type: ignore[no-untyped-def]
    weight, ids, ctx.first_row = inputs
    ctx.save_for_backward(ids)
    ctx.rows = weight.shape[0]


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    (ids,) = ctx.saved_tensors
    return torch.ops.megatron.embedding_backward(gradient, ids, ctx.rows, ctx.first_row), None, None
