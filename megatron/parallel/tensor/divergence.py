"""The KL divergence of two networks' distributions over a split vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.autograd.function import once_differentiable

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_max, all_reduce_sum
from megatron.parallel.tensor.cross_entropy import VocabularySlice

# Logits held in float32 at once: 1 MiB on the CPU, which stays in cache, and 64 MiB on a GPU.
_BLOCK_VALUES_CPU = 1 << 18
_BLOCK_VALUES_GPU = 1 << 24


def vocab_parallel_divergences(
    logits: torch.Tensor,
    target_logits: torch.Tensor,
    axis: Axis,
    vocab_size: int,
    *,
    temperature: float = 1.0,
    block_values: int | None = None,
) -> torch.Tensor:
    """KL(p || q) of every token, in nats, where p = softmax(target / T) and q = softmax(logits / T).

    Five values per token are reduced over the axis instead of the logits. Padded columns (ids from `vocab_size` on)
    have probability 0 in both distributions. Only `logits` are differentiated. The result is float32 (float64 for
    float64), the same on every rank of the axis, and never negative: with d = log q - log p, it sums q - p - p d, whose
    terms are not negative up to rounding, rather than -p d, whose terms cancel.

    Shapes: logits and target_logits `[b, s, v/t]`; result `[b, s]`.

    Args:
        temperature: T.
        block_values: maximum number of logits that are held in float32 at once, but at least one row; it does not
            affect the result.

    Source: Hinton et al., "Distilling the knowledge in a neural network", 2015, section 2; for the split softmax,
    Shoeybi et al., "Megatron-LM", 2019, section 3.
    """
    divergences: torch.Tensor = _Divergences.apply(logits, target_logits, axis, vocab_size, temperature, block_values)
    return divergences


class _Divergences(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target_logits, axis, vocab_size, temperature, block_values):  # type: ignore[no-untyped-def]
        pair = [part.reshape(-1, part.shape[-1]) for part in (logits, target_logits)]  # each [b*s, v/t]
        valid = VocabularySlice.of(axis, pair[0].shape[1], vocab_size).valid
        blocks = list(_blocks(pair[0], valid, block_values))
        normalizers = torch.stack([_log_normalizer(rows, axis, valid, temperature, blocks) for rows in pair])
        total = torch.zeros_like(normalizers[0])
        for block in blocks:
            log_q, log_p = _log_probabilities(pair, normalizers, valid, temperature, block)
            p = log_p.exp()
            total[block] = (log_q.exp() - p + p * (log_p - log_q)).sum(dim=1)
        ctx.save_for_backward(*pair, normalizers)
        ctx.valid, ctx.temperature, ctx.blocks, ctx.shape = valid, temperature, blocks, logits.shape
        if axis.size > 1:
            total = all_reduce_sum(total, axis)
        return total.clamp_(min=0.0).view(logits.shape[:-1])

    @staticmethod
    @once_differentiable
    def backward(ctx, derivatives):  # type: ignore[no-untyped-def]
        *pair, normalizers = ctx.saved_tensors
        gradient = torch.zeros_like(pair[0])
        weights = derivatives.reshape(-1, 1) / ctx.temperature
        for block in ctx.blocks:
            log_q, log_p = _log_probabilities(pair, normalizers, ctx.valid, ctx.temperature, block)
            gradient[block, : ctx.valid] = (log_q.exp_() - log_p.exp_()).mul_(weights[block]).to(gradient.dtype)
        return gradient.view(ctx.shape), None, None, None, None, None


def _log_normalizer(
    rows: torch.Tensor, axis: Axis, valid: int, temperature: float, blocks: list[slice]
) -> torch.Tensor:
    """The logarithm of the softmax denominator over all ranks. Shapes: `[n, v/t]` to `[n]`."""
    dtype = torch.promote_types(rows.dtype, torch.float32)
    largest = torch.full((rows.shape[0],), torch.finfo(dtype).min, dtype=dtype, device=rows.device)
    total = torch.zeros_like(largest)
    for block in blocks if valid else ():
        scaled = rows[block, :valid].to(dtype) / temperature
        largest[block] = scaled.amax(dim=1)
        total[block] = (scaled - largest[block].unsqueeze(1)).exp_().sum(dim=1)
    if axis.size > 1:
        local_largest = largest.clone()
        all_reduce_max(largest, axis)
        total = all_reduce_sum(total.mul_(torch.exp(local_largest - largest)), axis)
    return total.log_().add_(largest)


def _log_probabilities(
    pair: list[torch.Tensor], normalizers: torch.Tensor, valid: int, temperature: float, block: slice
) -> list[torch.Tensor]:
    """The log-probabilities of this rank's columns for both networks. Shapes: each `[rows of the block, valid]`."""
    dtype = normalizers.dtype
    return [
        (rows[block, :valid].to(dtype) / temperature).sub_(normalizer[block].unsqueeze(1))
        for rows, normalizer in zip(pair, normalizers, strict=True)
    ]


def _blocks(rows: torch.Tensor, valid: int, block_values: int | None) -> Iterator[slice]:
    size = block_values or (_BLOCK_VALUES_GPU if rows.is_cuda else _BLOCK_VALUES_CPU)
    count = max(1, size // max(1, valid))
    return (slice(first, first + count) for first in range(0, rows.shape[0], count))
