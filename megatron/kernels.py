"""Operations that have fused implementations, and a report of which implementation is in use.

All currently use plain torch, whose attention, GELU and layer norm are single kernels on GPU and CPU. Custom or apex
kernels can be added behind the same functions; `kernel_report` reports which one runs and why.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.device import device_type


@dataclass(frozen=True)
class KernelChoice:
    """An operation, its implementation in use, and a note on why, or on what would be faster."""

    operation: str
    implementation: str
    note: str


def gelu(x: torch.Tensor, tanh_form: bool) -> torch.Tensor:
    """GELU, exact or with the tanh approximation.

    Source: Hendrycks and Gimpel, "Gaussian error linear units", 2016, section 2.
    """
    return F.gelu(x, approximate="tanh" if tanh_form else "none")


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """Layer norm over the last dimension; statistics in float32 also for half-precision input.

    Source: Ba, Kiros, Hinton, "Layer normalization", 2016, equation 4.
    """
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Softmax attention scaled by 1/sqrt(d), the softmax in float32.

    Shapes: query `[b, a, s, d]`, key and value `[b, a, k, d]`, bias `[b or 1, 1, s, k]` in the query's dtype,
    added to the scores.

    Source: Vaswani et al., "Attention is all you need", 2017, equation 1.
    """
    return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=dropout, is_causal=causal)


def explicit_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    drop: Callable[[torch.Tensor], torch.Tensor],
    *,
    bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """The same attention, with materialized probabilities to which `drop` is applied; causal if there is no bias.

    For CPUs, where torch's fused attention does not support dropout and its fallback draws random numbers serially;
    this takes about half the time.

    Shapes: as in `attention`; `drop` maps `[b, a, s, k]` to the same.
    """
    batch, heads, length, size = query.shape
    if bias is None:
        bias = torch.full((length, key.shape[2]), float("-inf"), dtype=query.dtype, device=query.device)
        bias = bias.triu_(key.shape[2] - length + 1)[None, None]
    flat_bias = bias[0]
    if batch > 1 < bias.shape[0]:
        flat_bias = bias.expand(batch, heads, -1, -1).reshape(-1, *bias.shape[2:])  # [b*a, s, k]
    flat_query, flat_key, flat_value = (part.reshape(-1, part.shape[2], size) for part in (query, key, value))
    scores = torch.baddbmm(flat_bias, flat_query, flat_key.transpose(1, 2), alpha=1 / math.sqrt(size))  # [b*a, s, k]
    probabilities = drop(scores.softmax(dim=-1).view(batch, heads, length, -1))
    return torch.bmm(probabilities.view(scores.shape), flat_value).view(query.shape)  # [b, a, s, d]


def masked_scale(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """`x * scale` where `keep`, else 0; one kernel on a GPU.

    Shapes: x and keep (bool) have the same shape.
    """
    if x.is_cuda:
        return torch.ops.aten.native_dropout_backward(x, keep, scale)  # type: ignore[no-any-return]
    return (x * keep.to(x.dtype)).mul_(scale)  # a product with a bool tensor is 7 times slower on CPU


def kernel_report() -> list[KernelChoice]:
    """The implementation that each operation uses on this machine."""
    on_gpu = device_type() == "cuda"
    attention_note = (
        "flash, memory-efficient or cuDNN attention, chosen by torch for the shapes"
        if on_gpu
        else "torch's CPU flash attention; with --attention-dropout above 0, explicit attention, which is slower"
    )
    apex = "apex is installed but not needed" if is_installed("apex") else "apex is not installed and not needed"
    return [
        KernelChoice("attention", "torch scaled_dot_product_attention", attention_note),
        KernelChoice("gelu", "torch", "fused forward and backward; the bias is added by the matrix product"),
        KernelChoice("layer_norm", "torch", apex),
        KernelChoice("cross_entropy", "torch", "over the split vocabulary, in blocks of rows, float32"),
        KernelChoice("hidden_dropout", "torch", "stateless hash; the same in every layout"),
        KernelChoice("optimizer", "torch fused AdamW", apex),
    ]


def is_installed(package: str) -> bool:
    """Whether a package can be found, without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
