"""Which implementation each operation uses on this machine, and why."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.device import device_type
from megatron.kernels.choice import is_installed


@dataclass(frozen=True)
class KernelChoice:
    """An operation, its implementation in use, and a note on why, or on what would be faster."""

    operation: str
    implementation: str
    note: str


def kernel_report() -> list[KernelChoice]:
    """The implementation that each operation uses on this machine."""
    on_gpu = device_type() == "cuda"
    attention_note = (
        "flash, memory-efficient or cuDNN attention, chosen by torch for the shapes"
        if on_gpu
        else "torch's CPU flash attention; with --attention-dropout above 0, explicit attention, which is slower"
    )
    bounded = (
        (
            "torch varlen and flex attention",
            "variable-length flash attention from torch 2.12 in half precision, else flex",
        )
        if on_gpu
        else ("blocks of torch attention", "one call per document, blocks as wide as the window")
    )
    apex = "apex is installed but not needed" if is_installed("apex") else "apex is not installed and not needed"
    return [
        KernelChoice("attention", "torch scaled_dot_product_attention", attention_note),
        KernelChoice("attention_of_documents_and_windows", *bounded),
        KernelChoice("activation", "torch", "fused forward and backward; the bias is added by the matrix product"),
        KernelChoice("layer_norm", "torch", apex),
        KernelChoice("rms_norm", "torch", "statistics in float32, a backward pass of its own"),
        KernelChoice("rotary", "torch", "in the precision of the cosines"),
        KernelChoice("cross_entropy", "torch", "over the split vocabulary, in blocks of rows, float32"),
        KernelChoice("hidden_dropout", "torch", "stateless hash; the same in every layout"),
        KernelChoice("optimizer", "torch fused AdamW", apex),
    ]
