"""Bias, stateless dropout and residual: `residual + multiplier * dropout(x + bias)`, compiled in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config.architecture.dropout import DROPOUT_STEPS
from megatron.kernels.choice import Implementation
from megatron.kernels.hashing import counters, half_words, low_half, mix_32, mix_64, signed


@dataclass(frozen=True)
class Dropout:
    """A dropout mask as a hash of each entry's coordinates, which needs no random state and no stored mask.

    Shapes: rows `[...]` int64, the hashed coordinates of each row of the values `[..., h]`.

    Attributes:
        threshold: the probability in units of 1 / 65536.
        column_base: start value of the columns' hashes; a tensor `[]` int64 under torch.compile, so that one program
            serves all sites.
    """

    rows: torch.Tensor
    threshold: int
    column_base: int | torch.Tensor

    @property
    def is_traced(self) -> bool:
        """True under torch.compile, which fuses torch's operations and cannot pass a number to the compiled ones."""
        return isinstance(self.column_base, torch.Tensor)

    @property
    def scale(self) -> float:
        """The factor of kept entries."""
        return DROPOUT_STEPS / (DROPOUT_STEPS - self.threshold) if self.threshold < DROPOUT_STEPS else 0.0

    def kept(self, columns: int) -> torch.Tensor:
        """The mask of kept entries: one 32-bit hash of (row, pair of columns) decides two neighbours with 16 bits each.

        Shapes: result `[..., columns]` bool.
        """
        pairs = (columns + 1) // 2
        base = signed(self.column_base, 64) if isinstance(self.column_base, int) else self.column_base
        column = mix_64(counters(0, pairs, self.rows.device) ^ base)  # [columns/2]
        bits = low_half(self.rows).unsqueeze(-1) ^ low_half(column)  # [..., columns/2] int32
        bits = half_words(mix_32(bits))  # [..., columns or columns + 1]
        drops_all = self.threshold >= DROPOUT_STEPS
        keep = torch.zeros_like(bits, dtype=torch.bool) if drops_all else bits >= self.threshold - DROPOUT_STEPS // 2
        return keep[..., :columns] if keep.shape[-1] != columns else keep


def operands(dropout: Dropout | None) -> tuple[torch.Tensor | None, int, int]:
    """The arguments of a dropout for compiled operations: rows, threshold and base of the columns' hashes."""
    if dropout is None or not isinstance(dropout.column_base, int):
        return None, 0, 0
    return dropout.rows, dropout.threshold, signed(dropout.column_base, 64)


def dropout_add(
    x: torch.Tensor,
    dropout: Dropout | None = None,
    *,
    bias: torch.Tensor | None = None,
    residual: torch.Tensor | None = None,
    multiplier: float = 1.0,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """`residual + multiplier * dropout(x + bias)`.

    In float32 both implementations are bitwise equal; in half precision the compiled one rounds once, at the end. For
    backward it keeps only the rows' hashes, the other a mask of one byte per entry.

    Shapes: x and residual `[..., h]`, bias `[h]`; result as x.
    """
    combines = dropout is not None or bias is not None or multiplier != 1  # torch's plain addition is as fast
    is_traced = dropout is not None and dropout.is_traced
    takes_it = implementation is Implementation.CSRC and combines and not is_traced
    if takes_it and (residual is None or residual.dtype == x.dtype):
        return torch.ops.megatron.dropout_add(x, bias, residual, *operands(dropout), multiplier)  # type: ignore[no-any-return]
    if bias is not None:
        x = x + bias
    if dropout is not None:
        x = _HashedDropout.apply(x, dropout)
    if multiplier != 1:
        x = x * multiplier
    return x if residual is None else residual + x


class _HashedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, dropout):  # type: ignore[no-untyped-def]
        keep = dropout.kept(x.shape[-1])
        ctx.save_for_backward(keep)
        ctx.scale = dropout.scale
        return _masked_scale(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (keep,) = ctx.saved_tensors
        return _masked_scale(gradient, keep, ctx.scale), None


def _masked_scale(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """`x * scale` where `keep`, else 0; one kernel on a GPU.

    Shapes: x and keep (bool) have the same shape.
    """
    if x.is_cuda:
        return torch.ops.aten.native_dropout_backward(x, keep, scale)  # type: ignore[no-any-return]
    return (x * keep.to(x.dtype)).mul_(scale)  # a product with a bool tensor is 7 times slower on CPU


def register() -> None:
    """Registers the result shapes of the compiled operation with torch; once, after the library is loaded."""
    torch.library.register_fake("megatron::dropout_add", lambda x, *others: torch.empty_like(x.contiguous()))
    torch.library.register_fake("megatron::dropout_add_backward", _shapes_of_gradients)


def _shapes_of_gradients(gradient, rows, threshold, column_base, multiplier, bias_dtype):  # type: ignore[no-untyped-def]
    of_bias = gradient.new_empty(0 if bias_dtype is None else gradient.shape[-1], dtype=bias_dtype)
    return torch.empty_like(gradient.contiguous()), of_bias
