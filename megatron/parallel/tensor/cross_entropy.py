"""Cross-entropy over logits whose vocabulary dimension is split across ranks."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_max, all_reduce_sum

# Default number of logits held in float32 at once: 1 MiB on the CPU, which stays in cache, and 256 MiB on a GPU.
_BLOCK_VALUES_CPU = 1 << 18
_BLOCK_VALUES_GPU = 1 << 26


def vocab_parallel_cross_entropy(
    logits: torch.Tensor, labels: torch.Tensor, axis: Axis, vocab_size: int, *, block_values: int | None = None
) -> torch.Tensor:
    """The negative log-probability of every label, in float32.

    Padded columns (ids from `vocab_size` on) are treated as minus infinity: their probability and gradient are exactly
    0. Only the logits and one value per token are kept for backward; blocks of rows are converted to float32 one at a
    time.

    Shapes: logits `[b, s, v/t]`, labels `[b, s]` int64; result `[b, s]` float32, the same on every rank of the axis.

    Args:
        block_values: maximum number of logits held in float32 at once, but at least one row; it bounds the extra memory
            and does not affect the result.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (the fused parallel cross-entropy).
    """
    if block_values is None:
        block_values = _BLOCK_VALUES_GPU if logits.is_cuda else _BLOCK_VALUES_CPU
    return _CrossEntropy.apply(logits, labels, axis, vocab_size, block_values)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, axis, vocab_size, block_values):  # type: ignore[no-untyped-def]
        columns = logits.shape[-1]
        first = axis.rank * columns
        valid = max(0, min(columns, vocab_size - first))
        rows = logits.reshape(-1, columns)[:, :valid]  # [b*s, valid]
        local = labels.reshape(-1) - first
        own = (local >= 0) & (local < valid)
        local = local.masked_fill(~own, 0)
        largest, total, target = _row_statistics(rows, local, block_values)
        if axis.size > 1:
            own_largest = largest.clone()
            all_reduce_max(largest, axis)
            total.mul_(torch.exp(own_largest - largest))
            sums = torch.stack([total, target.masked_fill(~own, 0.0)])
            total, target = all_reduce_sum(sums, axis)
        normalizer = total.log().add_(largest)
        ctx.save_for_backward(logits, local, own, normalizer)
        ctx.valid, ctx.block_values = valid, block_values
        return (normalizer - target).view(labels.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        logits, local, own, normalizer = ctx.saved_tensors
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        result[..., ctx.valid :] = 0
        flat, columns = result.view(-1, result.shape[-1]), logits.shape[-1]
        rows, weights = logits.reshape(-1, columns), gradient.reshape(-1, 1).float()
        for block in _blocks(rows.shape[0], ctx.valid, ctx.block_values):
            # the subtraction converts half-precision logits to float32 without a separate copy
            values = (rows[block, : ctx.valid] - normalizer[block].unsqueeze(1)).exp_()
            # subtract 1 only where the label is on this rank
            values.scatter_add_(1, local[block].unsqueeze(1), -own[block].unsqueeze(1).to(values.dtype))
            flat[block, : ctx.valid] = values.mul_(weights[block])
        return result, None, None, None, None


def _row_statistics(
    rows: torch.Tensor, local: torch.Tensor, block_values: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """For every row: its largest logit, the sum of exp(logit - largest), and the logit at `local`; each `[n]`
    float32.
    """
    count, valid = rows.shape
    largest = torch.full((count,), torch.finfo(torch.float32).min, device=rows.device)
    total, target = torch.zeros_like(largest), torch.zeros_like(largest)
    if valid == 0:
        return largest, total, target
    for block in _blocks(count, valid, block_values):
        largest[block] = rows[block].amax(dim=1)
        target[block] = rows[block].gather(1, local[block].unsqueeze(1)).squeeze(1)
        total[block] = (rows[block] - largest[block].unsqueeze(1)).exp_().sum(dim=1)
    return largest, total, target


def _blocks(count: int, width: int, block_values: int) -> list[slice]:
    size = max(1, block_values // max(1, width))
    return [slice(first, min(count, first + size)) for first in range(0, count, size)] if width else []
