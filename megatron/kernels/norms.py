"""Norms over the last dimension; statistics in float32 also for half-precision input."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, *, zero_centered: bool = False
) -> torch.Tensor:
    """Layer norm.

    Args:
        zero_centered: the weight is stored as its difference from 1.

    Source: Ba, Kiros, Hinton, "Layer normalization", 2016, equation 4.
    """
    return F.layer_norm(x, weight.shape, weight + 1 if zero_centered else weight, bias, eps)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, zero_centered: bool = False) -> torch.Tensor:
    """RMS norm, the result in the dtype of x.

    In half precision the normalized values are rounded before the product with the weight, as in Llama; with a
    zero-centred weight after it, as in Gemma.

    Args:
        zero_centered: the weight is stored as its difference from 1.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019, equation 4.
    """
    normalized = normalize(x, eps)
    if zero_centered:
        return (normalized * (weight.to(normalized.dtype) + 1)).to(x.dtype)
    return normalized.to(x.dtype) * weight


def normalize(x: torch.Tensor, eps: float) -> torch.Tensor:
    """`x / sqrt(mean(x^2) + eps)` over the last dimension, in float32 or wider."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + eps)
