"""The report of the implementations in use on this machine."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron.config.sections.computation import AUTO, OPERATIONS
from megatron.device import device_type
from megatron.kernels.choice import Implementation, Kernels
from megatron.kernels.native.choosing import choose, implementations
from megatron.kernels.native.library import REBUILD, library
from megatron.kernels.native.measured import MEASURED, speeds_of

# Notes on torch's implementations that are not obvious.
_OF_TORCH = {
    "activation": "fused forward and backward; the bias is added by the matrix product",
    "dropout_add": "stateless hash; the same in every layout",
    "cross_entropy": "over the split vocabulary, in blocks of rows, float32",
    "optimizer": "torch fused AdamW",
}


@dataclass(frozen=True)
class KernelChoice:
    """An operation, its implementation in use, and a note on the reason or on a faster one."""

    operation: str
    implementation: str
    note: str


def kernel_report(kernels: Kernels | None = None) -> list[KernelChoice]:
    """The implementation that each operation uses on this machine.

    Args:
        kernels: the kernels of a run; None for what `--kernels auto` chooses.
    """
    device = torch.device(device_type())
    chosen = kernels or choose(dict.fromkeys(OPERATIONS, AUTO), device)
    return [*_attention(device.type == "cuda"), *(_choice(name, getattr(chosen, name), device) for name in OPERATIONS)]


def _attention(on_gpu: bool) -> list[KernelChoice]:
    if on_gpu:
        return [
            KernelChoice(
                "attention",
                "torch scaled_dot_product_attention",
                "flash, memory-efficient or cuDNN attention, chosen by torch for the shapes",
            ),
            KernelChoice(
                "attention_of_documents_and_windows",
                "torch varlen and flex attention",
                "variable-length flash attention from torch 2.10 in half precision, else flex",
            ),
        ]
    return [
        KernelChoice(
            "attention",
            "torch scaled_dot_product_attention",
            "torch's CPU flash attention; with --attention-dropout above 0, explicit attention, which is slower",
        ),
        KernelChoice(
            "attention_of_documents_and_windows",
            "blocks of torch attention",
            "one call per document, blocks as wide as the window",
        ),
    ]


def _choice(operation: str, chosen: Implementation, device: torch.device) -> KernelChoice:
    notes = []
    speed = speeds_of(operation, device.type).get(Implementation.CSRC)
    if chosen is Implementation.CSRC:
        notes.append(
            f"not measured on {device.type}"
            if speed is None
            else f"measured {speed:.1f} times as fast as torch on {MEASURED[device.type].hardware}"
        )
    if chosen is Implementation.TORCH:
        notes += [_OF_TORCH[operation]] if operation in _OF_TORCH else []
        if speed is not None and speed > 1 and Implementation.CSRC not in implementations(operation, device):
            missing = "not built" if library() is None else "not in the library"
            notes.append(f"csrc, measured {speed:.1f} times as fast, is {missing}: {REBUILD}")
        elif speed is None:
            notes.append(f"csrc was not measured on {device.type}; --kernels {operation}=csrc uses it")
    return KernelChoice(operation, chosen.value, "; ".join(notes))
