"""Soft-capping of values."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable


def softcapped(x: torch.Tensor, cap: float) -> torch.Tensor:
    """`cap * tanh(x / cap)`; only the result is kept for backward.

    Source: Gemma Team, "Gemma 2", 2024, section 2 (logit soft-capping).
    """
    return _SoftCap.apply(x, cap)  # type: ignore[no-any-return]


class _SoftCap(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, cap):  # type: ignore[no-untyped-def]
        result = torch.tanh(x / cap).mul_(cap)
        ctx.save_for_backward(result)
        ctx.cap = cap
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (result,) = ctx.saved_tensors
        slope = (result / ctx.cap).square_().neg_().add_(1)
        return slope.mul_(gradient), None
