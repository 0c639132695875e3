"""Cross-entropy over a slice of the vocabulary: the statistics of a row of logits for its losses, and the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from megatron.kernels.choice import Implementation

# Default number of logits held in float32 at once: 1 MiB on the CPU, which stays in cache, and 256 MiB on a GPU.
_BLOCK_VALUES_CPU = 1 << 18
_BLOCK_VALUES_GPU = 1 << 26


class RowStatistics(NamedTuple):
    """The statistics of a row that its losses depend on; those of vocabulary slices combine by a maximum and sums.

    Shapes: each `[n]`, float32 (float64 for logits in float64).

    Attributes:
        largest: the largest logit; the lowest finite number if there are no columns.
        total: sum of exp(logit - largest).
        target: the label's logit; 0 if the label is not among the columns.
        logit_sum: the sum of the logits, if requested.
    """

    largest: torch.Tensor
    total: torch.Tensor
    target: torch.Tensor
    logit_sum: torch.Tensor | None


class LossGradients(NamedTuple):
    """The derivatives of the objective by the terms of each row's loss; None means zeros.

    Shapes: each `[n]`.

    Attributes:
        of_label: by the cross-entropy, log normalizer - label's logit.
        of_normalizer: by the log normalizer.
        of_uniform: by the cross-entropy with the uniform distribution, log normalizer - mean logit.
    """

    of_label: torch.Tensor | None
    of_normalizer: torch.Tensor | None = None
    of_uniform: torch.Tensor | None = None


def logit_statistics(
    logits: torch.Tensor,
    labels: torch.Tensor,
    valid: int,
    *,
    softcap: float | None = None,
    with_logit_sum: bool = False,
    block_values: int | None = None,
    implementation: Implementation = Implementation.TORCH,
) -> RowStatistics:
    """The statistics of every row of logits.

    Shapes: logits `[n, v/t]`; labels `[n]` int64, indices of columns, possibly out of range.

    Args:
        valid: number of leading columns that count; the others are padding.
        softcap: apply `cap * tanh(logit / cap)` to the logits first.
        with_logit_sum: compute `RowStatistics.logit_sum`.
        block_values: most logits that torch's operations hold in float32 at once, but at least one row; does not affect
            the result.
    """
    if implementation is Implementation.CSRC:
        statistics = torch.ops.megatron.logit_statistics(logits, labels, valid, softcap or 0.0)  # [4, n]
        return RowStatistics(statistics[0], statistics[1], statistics[2], statistics[3] if with_logit_sum else None)
    count = logits.shape[0]
    dtype = torch.promote_types(logits.dtype, torch.float32)
    if valid == 0:
        largest = torch.full((count,), torch.finfo(dtype).min, dtype=dtype, device=logits.device)
        total, target = torch.zeros_like(largest), torch.zeros_like(largest)
        return RowStatistics(largest, total, target, torch.zeros_like(largest) if with_logit_sum else None)
    local, is_own = _columns_of(labels, valid)
    column = local.unsqueeze(1)
    parts = []
    for block in _blocks(logits, valid, block_values):
        rows = _capped(_part(logits, block, valid), softcap)
        maxima = rows.amax(dim=1, keepdim=True).to(dtype)
        total = (rows - maxima).exp_().sum(dim=1)
        logit_sum = rows.sum(dim=1, dtype=dtype) if with_logit_sum else None
        parts.append((maxima, total, rows.gather(1, _part(column, block)).to(dtype), logit_sum))
    largest, total, target, logit_sum = parts[0] if len(parts) == 1 else _joined(parts)
    return RowStatistics(largest.squeeze(1), total, target.squeeze(1).masked_fill_(~is_own, 0.0), logit_sum)


def logit_gradient(
    logits: torch.Tensor,
    labels: torch.Tensor,
    normalizer: torch.Tensor,
    gradients: LossGradients,
    valid: int,
    vocab_size: int,
    *,
    softcap: float | None = None,
    in_place: bool = False,
    block_values: int | None = None,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """The gradient of every logit, in the dtype of the logits; exactly 0 in padding columns.

    Shapes: logits and result `[n, v/t]`; labels and normalizer `[n]`.

    Args:
        normalizer: logarithm of the softmax denominator over the whole vocabulary.
        valid: as in `logit_statistics`.
        vocab_size: number of valid columns on all ranks.
        softcap: as in `logit_statistics`; the gradient is with respect to the logits before it.
        in_place: overwrite the logits.
        block_values: as in `logit_statistics`.
    """
    if implementation is Implementation.CSRC:
        operations = torch.ops.megatron
        operation = operations.logit_gradient_ if in_place else operations.logit_gradient
        gradient = operation(logits, labels, normalizer, *gradients, valid, vocab_size, softcap or 0.0)
        return logits if in_place else gradient
    result = logits if in_place else torch.empty_like(logits, memory_format=torch.contiguous_format)
    return _write_gradient(result, logits, labels, normalizer, gradients, valid, vocab_size, softcap, block_values)


def cross_entropy_(
    logits: torch.Tensor, labels: torch.Tensor, weights: torch.Tensor, valid: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Replaces logits of a whole vocabulary by the gradient of the weighted sum of cross-entropies.

    Requires the compiled operations, which on a GPU read a half-precision row once.

    Shapes: logits `[n, v]`; labels `[n]` int64, weights `[n]`.

    Returns:
        The cross-entropy and the log normalizer of every row. Shapes: `[n]`.
    """
    cross_entropy, normalizer = torch.ops.megatron.logit_losses_(logits, labels, weights, valid)
    return cross_entropy, normalizer


def _write_gradient(
    result: torch.Tensor,
    logits: torch.Tensor,
    labels: torch.Tensor,
    normalizer: torch.Tensor,
    gradients: LossGradients,
    valid: int,
    vocab_size: int,
    softcap: float | None,
    block_values: int | None,
) -> torch.Tensor:
    """Writes the gradient into `result`, which may be `logits`, and returns it."""
    if valid < result.shape[1]:
        result[:, valid:].zero_()
    if valid == 0:
        return result
    of_label, of_normalizer, of_uniform = (
        None if part is None else part.unsqueeze(1).to(normalizer.dtype) for part in gradients
    )
    # Without other terms, (probability - 1) is multiplied as one; separate products would round differently.
    is_alone = of_normalizer is None and of_uniform is None
    present = [part for part in (of_label, of_normalizer, of_uniform) if part is not None]
    weights = sum(present[1:], present[0]) if present else torch.zeros_like(normalizer).unsqueeze(1)
    local, is_own = (part.unsqueeze(1) for part in _columns_of(labels, valid))
    at_label = is_own.to(normalizer.dtype) if is_alone or of_label is None else is_own * of_label
    for block in _blocks(logits, valid, block_values):
        # float32 results are computed in target; for half precision the subtraction converts without a copy
        target = _part(result, block, valid) if result.dtype == normalizer.dtype else None
        rows = _capped(_part(logits, block, valid), softcap)
        slope = None if softcap is None else (rows / softcap).square_().neg_().add_(1)
        values = torch.sub(rows, _part(normalizer, block).unsqueeze(1), out=target).exp_()
        if not is_alone:
            values.mul_(_part(weights, block))
        if of_label is not None:
            # only if the label is on this rank
            values.scatter_add_(1, _part(local, block), -_part(at_label, block))
        if of_uniform is not None:
            values.sub_(_part(of_uniform, block) / vocab_size)
        if is_alone:
            values.mul_(_part(weights, block))
        if slope is not None:
            values.mul_(slope)
        if target is None:
            _part(result, block, valid).copy_(values)
    return result


def _part(rows: torch.Tensor, block: slice, valid: int | None = None) -> torch.Tensor:
    """The rows of a block, and the first columns; avoids slices of everything, which cost time in small networks."""
    if block.start != 0 or block.stop != len(rows):
        rows = rows[block]
    return rows if valid is None or valid == rows.shape[1] else rows[:, :valid]


def _columns_of(labels: torch.Tensor, valid: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The column of each label, clamped to the first `valid`, and True for labels that are inside."""
    nearest = labels.clamp(0, valid - 1)
    return nearest, nearest == labels


def _joined(parts: Sequence[tuple[torch.Tensor | None, ...]]) -> tuple[Any, ...]:
    return tuple(None if column[0] is None else torch.cat(column) for column in zip(*parts, strict=True))


def _capped(rows: torch.Tensor, softcap: float | None) -> torch.Tensor:
    if softcap is None:
        return rows
    return torch.tanh(rows.to(torch.promote_types(rows.dtype, torch.float32)) / softcap).mul_(softcap)


def _blocks(logits: torch.Tensor, valid: int, block_values: int | None) -> list[slice]:
    if block_values is None:
        block_values = _BLOCK_VALUES_GPU if logits.is_cuda else _BLOCK_VALUES_CPU
    count = logits.shape[0]
    size = max(1, block_values // max(1, valid))
    return [slice(first, min(count, first + size)) for first in range(0, max(1, count), size)]


def register() -> None:
    """Registers the result shapes of the compiled operations with torch; once, after the library is loaded. Their
    derivatives are defined by `vocab_parallel_losses` and `head_losses`.
    """
    torch.library.register_fake("megatron::logit_statistics", _fake_statistics)
    torch.library.register_fake("megatron::logit_gradient", lambda logits, *others: logits.new_empty(logits.shape))
    torch.library.register_fake("megatron::logit_gradient_", lambda logits, *others: None)
    torch.library.register_fake("megatron::logit_losses_", lambda logits, *others: _new_rows(2, logits))


def _fake_statistics(logits: torch.Tensor, labels: torch.Tensor, valid: int, softcap: float) -> torch.Tensor:
    return _new_rows(4, logits)


def _new_rows(count: int, logits: torch.Tensor) -> torch.Tensor:
    return logits.new_empty((count, logits.shape[0]), dtype=torch.promote_types(logits.dtype, torch.float32))
