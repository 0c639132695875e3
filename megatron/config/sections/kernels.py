"""Switches of fused kernels: of attention, and those that published launch scripts pass."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection


@dataclass(frozen=True)
class KernelConfig(ConfigSection):
    """Fusions that may be switched; those of upstream are accepted and have no effect."""

    fused_attention: bool = flag(
        True,
        "attention without an s x s matrix of probabilities in memory; without documents or windows, turning it off "
        "keeps that matrix, for comparison",
    )
    bias_dropout_fusion: bool = flag(
        True, "fused bias, dropout and residual", ignored="PyTorch picks the kernel for this operation"
    )
    masked_softmax_fusion: bool = flag(
        True, "fused masked softmax", ignored="attention is one call of PyTorch's scaled_dot_product_attention"
    )
