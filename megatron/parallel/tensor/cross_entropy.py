"""Losses and the most probable token over logits whose vocabulary dimension is split across ranks."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.autograd.function import once_differentiable

from megatron.kernels.choice import Implementation
from megatron.kernels.cross_entropy import LossGradients, RowStatistics, logit_gradient, logit_statistics
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_max, all_reduce_sum


class TokenLosses(NamedTuple):
    """The terms of a loss over the vocabulary, per token, in float32 and the same on every rank of the axis.

    Shapes: each `[b, s]`.

    Attributes:
        cross_entropy: the negative log-probability of the label.
        log_normalizer: the logarithm of the softmax denominator.
        uniform: the mean negative log-probability over the vocabulary, if requested.
    """

    cross_entropy: torch.Tensor
    log_normalizer: torch.Tensor
    uniform: torch.Tensor | None


class VocabularySlice(NamedTuple):
    """A rank's rows of the vocabulary.

    Attributes:
        first: the id of the first row.
        valid: number of rows before the padding.
        vocab_size: vocabulary size without padding.
    """

    first: int
    valid: int
    vocab_size: int

    @classmethod
    def of(cls, axis: Axis, columns: int, vocab_size: int) -> VocabularySlice:
        """The slice of this rank, with `columns` rows including padding."""
        first = axis.rank * columns
        return cls(first, max(0, min(columns, vocab_size - first)), vocab_size)


def vocab_parallel_losses(
    logits: torch.Tensor,
    labels: torch.Tensor,
    axis: Axis,
    vocab_size: int,
    *,
    with_uniform: bool = False,
    block_values: int | None = None,
    implementation: Implementation = Implementation.TORCH,
) -> TokenLosses:
    """The differentiable losses of every token over a split vocabulary.

    Padded columns (ids from `vocab_size` on) are treated as minus infinity: their probability and gradient are exactly
    0, and means exclude them. Only the logits and one value per token are saved for backward; blocks of rows are
    converted to float32 one at a time.

    Shapes: logits `[b, s, v/t]`, labels `[b, s]` int64.

    Args:
        with_uniform: compute `TokenLosses.uniform`, for label smoothing.
        block_values: maximum number of logits that torch's operations hold in float32 at once, but at least one row; it
            bounds the extra memory and does not affect the result.

    Source: Shoeybi et al., "Megatron-LM", 2019, section 3 (the fused parallel cross-entropy).
    """
    return TokenLosses(*_Losses.apply(logits, labels, axis, vocab_size, with_uniform, block_values, implementation))


def vocab_parallel_argmax(logits: torch.Tensor, axis: Axis, vocab_size: int) -> torch.Tensor:
    """The id of the largest logit of each row, the smallest id among equal ones; the same on every rank.

    Communicates two maxima of one value per row instead of the logits.

    Shapes: logits `[..., v/t]`; result `[...]` int64.

    Args:
        vocab_size: columns from this id on are padding and never chosen.
    """
    vocabulary = VocabularySlice.of(axis, logits.shape[-1], vocab_size)
    if vocabulary.valid:
        largest, local = logits[..., : vocabulary.valid].max(dim=-1)
        largest, chosen = largest.float(), local + vocabulary.first
    else:  # this rank holds padding only
        largest = logits.new_full(logits.shape[:-1], float("-inf"), dtype=torch.float32)
        chosen = torch.full_like(largest, vocab_size, dtype=torch.int64)
    if axis.size > 1:
        everywhere = all_reduce_max(largest.clone(), axis)
        # The maximum of the negated ids is the smallest id; a rank whose maximum is smaller offers none.
        offered = torch.where(largest == everywhere, -chosen, torch.full_like(chosen, -vocab_size))
        chosen = -all_reduce_max(offered, axis)
    return chosen


def losses_of(statistics: RowStatistics, axis: Axis, vocabulary: VocabularySlice) -> TokenLosses:
    """Combines the ranks' statistics of the same rows: one all-reduce of the maxima, one of the sums.

    Shapes: statistics and losses `[n]`.
    """
    largest, total, target, whole = statistics
    if axis.size > 1:
        local_largest = largest.clone()
        all_reduce_max(largest, axis)
        total.mul_(torch.exp(local_largest - largest))
        sums = [total, target, *([] if whole is None else [whole])]
        total, target, *wholes = all_reduce_sum(torch.stack(sums), axis)
        whole = wholes[0] if wholes else None
    normalizer = total.log().add_(largest)
    uniform = None if whole is None else normalizer - whole / vocabulary.vocab_size
    return TokenLosses(normalizer - target, normalizer, uniform)


class _Losses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels, axis, vocab_size, with_uniform, block_values, implementation):  # type: ignore[no-untyped-def]
        rows = logits.reshape(-1, logits.shape[-1])  # [b*s, v/t]
        vocabulary = VocabularySlice.of(axis, rows.shape[1], vocab_size)
        local = labels.reshape(-1) - vocabulary.first
        statistics = logit_statistics(
            rows,
            local,
            vocabulary.valid,
            with_logit_sum=with_uniform,
            block_values=block_values,
            implementation=implementation,
        )
        losses = losses_of(statistics, axis, vocabulary)
        ctx.save_for_backward(logits, local, losses.log_normalizer)
        ctx.vocabulary, ctx.block_values, ctx.implementation = vocabulary, block_values, implementation
        ctx.set_materialize_grads(False)
        return (
            losses.cross_entropy.view(labels.shape),
            losses.log_normalizer.clone().view(labels.shape),
            None if losses.uniform is None else losses.uniform.view(labels.shape),
        )

    @staticmethod
    @once_differentiable
    def backward(ctx, *gradients):  # type: ignore[no-untyped-def]
        logits, local, normalizer = ctx.saved_tensors
        gradient = logit_gradient(
            logits.reshape(-1, logits.shape[-1]),
            local,
            normalizer,
            LossGradients(*(None if part is None else part.reshape(-1) for part in gradients)),
            ctx.vocabulary.valid,
            ctx.vocabulary.vocab_size,
            block_values=ctx.block_values,
            implementation=ctx.implementation,
        )
        return gradient.view(logits.shape), None, None, None, None, None, None
