"""Rotation of queries and keys by their positions."""

from __future__ import annotations

import torch


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, interleaved: bool = False) -> torch.Tensor:
    """Rotates pairs of channels: `(u, v)` becomes `(u cos - v sin, v cos + u sin)`.

    Only the first r channels of each head are rotated. The products are computed in the wider dtype of x and the
    cosines, and rounded once to x's.

    Shapes: x `[b, a, s, d]`; cos and sin `[b or 1, 1, s, r/2]`, r even and at most d; the result as x.

    Args:
        interleaved: a pair is two neighbours, channels 2i and 2i + 1; otherwise it is channels i and i + r/2.

    Source: Su et al., "RoFormer", 2021, equation 34.
    """
    half = cos.shape[-1]
    rotated = x[..., : 2 * half]
    if interleaved:
        first, second = rotated.unflatten(-1, (half, 2)).unbind(-1)  # [b, a, s, r/2]
    else:
        first, second = rotated.chunk(2, dim=-1)
    left, right = (first * cos - second * sin).to(x.dtype), (second * cos + first * sin).to(x.dtype)
    turned = torch.stack((left, right), dim=-1).flatten(-2) if interleaved else torch.cat((left, right), dim=-1)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)
