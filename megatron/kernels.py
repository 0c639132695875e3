"""Each operation that could be fused, and which implementation of it is in use here.

Today all run as plain torch, whose attention, GELU and layer norm are single kernels on GPU and CPU. An own or an apex kernel is
added behind the same function; `kernel_report` says which one runs and why.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from megatron.device import device_type


@dataclass(frozen=True)
class KernelChoice:
    """One operation, the implementation in use, and a sentence on why or what would be faster."""

    operation: str
    implementation: str
    note: str


def gelu(x: torch.Tensor, tanh_form: bool) -> torch.Tensor:
    """GELU, exact or in its tanh form.

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
    mask: torch.Tensor | None = None,
    causal: bool = False,
    dropout: float = 0.0,
) -> torch.Tensor:
    """Softmax attention scaled by 1/sqrt(d), the softmax in float32.

    Shapes: query `[b, a, s, d]`, key and value `[b, a, k, d]`, mask `[b or 1, 1, s, k]` bool, True where a query sees a key.

    Source: Vaswani et al., "Attention is all you need", 2017, equation 1.
    """
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, dropout_p=dropout, is_causal=causal)


def masked_scale(x: torch.Tensor, keep: torch.Tensor, scale: float) -> torch.Tensor:
    """`x * scale` where `keep`, else 0; one kernel on a GPU.

    Shapes: x and keep (bool) alike.
    """
    if x.is_cuda:
        return torch.ops.aten.native_dropout_backward(x, keep, scale)  # type: ignore[no-any-return]
    return (x * keep.to(x.dtype)).mul_(scale)  # a product with a bool tensor is 7 times slower on CPU


def kernel_report() -> list[KernelChoice]:
    """Which implementation each operation uses on this machine."""
    on_gpu = device_type() == "cuda"
    attention_note = (
        "flash, memory-efficient or cuDNN attention, chosen by torch for the shapes"
        if on_gpu
        else "torch's CPU flash attention; with --attention-dropout above 0 it is about ten times slower"
    )
    apex = "apex is installed and not needed" if is_installed("apex") else "apex is not installed and not needed"
    return [
        KernelChoice("attention", "torch scaled_dot_product_attention", attention_note),
        KernelChoice("gelu", "torch", "fused forward and backward; the bias is added by the matrix product"),
        KernelChoice("layer_norm", "torch", apex),
        KernelChoice("cross_entropy", "torch", "over the split vocabulary, in blocks of rows, float32"),
        KernelChoice("hidden_dropout", "torch", "stateless hash; the same in every layout"),
        KernelChoice("optimizer", "torch fused AdamW", apex),
    ]


def is_installed(package: str) -> bool:
    """Whether a package could be imported, found out without importing it."""
    try:
        return importlib.util.find_spec(package) is not None
    except (ImportError, ValueError):
        return False
