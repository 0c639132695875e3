"""Losses over logits whose vocabulary dimension is split across ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_max, all_reduce_sum

# Default number of logits held in float32 at once: 1 MiB on the CPU, which stays in cache, and 256 MiB on a GPU.
_BLOCK_VALUES_CPU = 1 << 18
_BLOCK_VALUES_GPU = 1 << 26


class TokenLosses(NamedTuple):
    """What a loss over the vocabulary is made of, per token, in float32 and the same on every rank of the axis.

    Shapes: each `[b, s]`.

    Attributes:
        cross_entropy: the negative log-probability of the label.
        log_normalizer: the logarithm of the softmax denominator.
        uniform: the mean negative log-probability over the vocabulary, if requested.
    """

    cross_entropy: torch.Tensor
    log_normalizer: torch.Tensor
    uniform: torch.Tensor | None


def vocab_parallel_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    axis: Axis,
    vocab_size: int,
    *,
    with_uniform: bool = False,
    block_values: int | None = None,
) -> TokenLosses:
    """The losses of every token over a split vocabulary; each of them is differentiable.

    Padded columns (ids from `vocab_size` on) are treated as minus infinity: their probability and gradient are exactly
    0, and no mean counts them. Only the logits and one value per token are kept for backward; blocks of rows are
    converted to float32 one at a time.

    Shapes: logits `[b, s, v/t]`, labels `[b, s]` int64.

    Args:
        with_uniform: whether to compute `TokenLosses.uniform`, which label smoothing needs.
        block_values: maximum number of logits held in float32 at once, but at least one row; it bounds the extra memory
            and does not affect the result.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (the fused parallel cross-entropy).
    """
    if block_values is None:
        block_values = _BLOCK_VALUES_GPU if logits.is_cuda else _BLOCK_VALUES_CPU
    return TokenLosses(*_Losses.apply(logits, labels, axis, vocab_size, with_uniform, block_values))


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, axis, vocab_size, with_uniform, block_values):  # type: ignore[no-untyped-def]
        columns = logits.shape[-1]
        first = axis.rank * columns
        valid = max(0, min(columns, vocab_size - first))
        rows = logits.reshape(-1, columns)[:, :valid]  # [b*s, valid]
        local = labels.reshape(-1) - first
        own = (local >= 0) & (local < valid)
        local = local.masked_fill(~own, 0)
        largest, total, target, whole = _row_statistics(rows, local, with_uniform, block_values)
        if axis.size > 1:
            own_largest = largest.clone()
            all_reduce_max(largest, axis)
            total.mul_(torch.exp(own_largest - largest))
            sums = [total, target.masked_fill(~own, 0.0), *([] if whole is None else [whole])]
            total, target, *wholes = all_reduce_sum(torch.stack(sums), axis)
            whole = wholes[0] if wholes else None
        normalizer = total.log().add_(largest)
        ctx.save_for_backward(logits, local, own, normalizer)
        ctx.valid, ctx.vocab_size, ctx.block_values = valid, vocab_size, block_values
        ctx.set_materialize_grads(False)
        return (
            (normalizer - target).view(labels.shape),
            normalizer.clone().view(labels.shape),
            None if whole is None else (normalizer - whole / vocab_size).view(labels.shape),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        logits, local, own, normalizer = ctx.saved_tensors
        of_label, of_normalizer, of_uniform = (
            None if gradient is None else gradient.reshape(-1, 1).float() for gradient in gradients
        )
        result = torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
        result[..., ctx.valid :] = 0
        flat, columns = result.view(-1, result.shape[-1]), logits.shape[-1]
        rows = logits.reshape(-1, columns)
        # A lone cross-entropy multiplies (probability - 1), not the two terms apart, which would round differently.
        is_alone = of_normalizer is None and of_uniform is None
        weights = sum(part for part in (of_label, of_normalizer, of_uniform) if part is not None)
        at_label = own.unsqueeze(1).float() if is_alone or of_label is None else own.unsqueeze(1) * of_label
        for block in _blocks(rows.shape[0], ctx.valid, ctx.block_values):
            # float32 results are computed in place; the subtraction converts half-precision logits without a copy
            place = flat[block, : ctx.valid] if flat.dtype == torch.float32 else None
            values = torch.sub(rows[block, : ctx.valid], normalizer[block].unsqueeze(1), out=place).exp_()
            if not is_alone:
                values.mul_(weights[block])
            if of_label is not None:
                # subtract only where the label is on this rank
                values.scatter_add_(1, local[block].unsqueeze(1), -at_label[block])
            if of_uniform is not None:
                values.sub_(of_uniform[block] / ctx.vocab_size)
            if is_alone:
                values.mul_(weights[block])
            if place is None:
                flat[block, : ctx.valid] = values
        return result, None, None, None, None, None


def _row_statistics(
    rows: torch.Tensor, local: torch.Tensor, with_whole: bool, block_values: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """For every row: its largest logit, the sum of exp(logit - largest), the logit at `local`, and on request the sum
    of the logits; each `[n]` float32.
    """
    count, valid = rows.shape
    largest = torch.full((count,), torch.finfo(torch.float32).min, device=rows.device)
    total, target = torch.zeros_like(largest), torch.zeros_like(largest)
    whole = torch.zeros_like(largest) if with_whole else None
    if valid == 0:
        return largest, total, target, whole
    for block in _blocks(count, valid, block_values):
        largest[block] = rows[block].amax(dim=1)
        target[block] = rows[block].gather(1, local[block].unsqueeze(1)).squeeze(1)
        total[block] = (rows[block] - largest[block].unsqueeze(1)).exp_().sum(dim=1)
        if whole is not None:
            whole[block] = rows[block].sum(dim=1, dtype=torch.float32)
    return largest, total, target, whole


def _blocks(count: int, width: int, block_values: int) -> list[slice]:
    size = max(1, block_values // max(1, width))
    return [slice(first, min(count, first + size)) for first in range(0, count, size)] if width else []
