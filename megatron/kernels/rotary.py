"""Rotation of queries and keys by their positions."""

from __future__ import annotations

import torch
from torch.autograd.function import once_differentiable


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotates pairs of channels: `(u, v)` becomes `(u cos - v sin, v cos + u sin)`.

    Only the first r channels of each head are rotated. The products are computed in the wider dtype of x and the
    cosines, and rounded once to x's. Cosines and sines get no gradient.

    Shapes: x `[b, a, s, d]`; cos and sin `[b or 1, 1, s, r/2]`, r even and at most d; the result as x.

    Args:
        interleaved: a pair is two neighbours, channels 2i and 2i + 1; otherwise it is channels i and i + r/2.

    Source: Su et al., "RoFormer", 2021, equation 34.
    """
    if torch.is_grad_enabled():
        return _Rotation.apply(x, cos, sin, interleaved)  # type: ignore[no-any-return]
    return _rotated(x, cos, sin, interleaved, 1)


def doubled(cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and signed sines of all channels, for `rotate_few`. Shapes: `[..., r/2]` to `[..., r]`."""
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_few(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """What `rotate` does with the two halves of whole heads, without gradient, in the fewest operations.

    For a few tokens, where starting an operation costs more than it computes.

    Shapes: x `[b, a, s, d]`; cos and sin `[b or 1, 1, s, d]`, made by `doubled`; the result as x.
    """
    return (x * cos).addcmul_(x.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


class _Rotation(torch.autograd.Function):
    """Backward is the rotation by the opposite angles, and needs nothing of x."""

    @staticmethod
    def forward(ctx, x, cos, sin, interleaved):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(cos, sin)
        ctx.interleaved = interleaved
        return _rotated(x, cos, sin, interleaved, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        cos, sin = ctx.saved_tensors
        return _rotated(gradient, cos, sin, ctx.interleaved, -1), None, None, None


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, direction: int) -> torch.Tensor:
    wide = x.to(torch.promote_types(x.dtype, cos.dtype))
    cos, sin = cos.to(wide.dtype), sin.to(wide.dtype)
    width = 2 * cos.shape[-1]
    result = torch.empty_like(wide)
    first, second = _pairs(wide[..., :width], interleaved)  # [b, a, s, r/2]
    new_first, new_second = _pairs(result[..., :width], interleaved)
    torch.mul(first, cos, out=new_first).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=new_second).addcmul_(first, sin, value=direction)
    if width < x.shape[-1]:
        result[..., width:] = wide[..., width:]
    return result.to(x.dtype)


def _pairs(x: torch.Tensor, interleaved: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of the first and second channel of every pair."""
    half = x.shape[-1] // 2
    return (x[..., ::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
