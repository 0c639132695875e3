"""Patches of DeepSpeed before and after its initialization, and around its messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch

from megatron.engine.ds_config import sub_groups_to_keep


def skip_shared_memory_build() -> None:
    """Keeps DeepSpeed from compiling its CPU collectives: half a minute, and an error without a compiler."""
    # DeepSpeed's own table runs a compiler for every operation when it is first read.
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def skip_optimizer_check() -> None:
    """Skips DeepSpeed's optimizer check, which warns, and the compilation of its Muon's functions in this check and in
    the gradient reduction of ZeRO 1 and 2.
    """
    deepspeed.runtime.engine.is_zero_supported_optimizer = lambda optimizer: True
    deepspeed.runtime.compiler.compile = lambda *_, **__: lambda function: function


@contextlib.contextmanager
def replaced_backend(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces DeepSpeed's communication backend, if it has one, by `wrap(backend)` in the block."""
    backend = deepspeed.comm.comm.cdb
    deepspeed.comm.comm.cdb = None if backend is None else wrap(backend)
    try:
        yield
    finally:
        deepspeed.comm.comm.cdb = backend


def keep_on_device(wrapper: Any, ratio: float, device: torch.device) -> list[int]:
    """Moves all but a share `ratio` of master weights and gradients back to the device, before the first step.

    DeepSpeed's own partial offload requires DeepSpeedCPUAdam, which must be compiled, divides sub-groups by number
    instead of size, and never changes the learning rate of its first group. Here a single AdamW of torch updates each
    sub-group on its device (`runtime/zero/stage3.py`, `_optimizer_step`).

    Returns:
        The indices of the sub-groups that were moved.
    """
    flats = wrapper.fp32_partitioned_groups_flat
    kept = sub_groups_to_keep([flat.numel() for flat in flats], ratio)
    for number in kept:
        flat, gradient = flats[number], flats[number].grad
        flat.grad = None
        flat.data = flat.data.to(device)
        if gradient is not None:
            flat.grad = gradient.to(device)
        wrapper.subgroup_to_device[number] = device.type
    wrapper.backup_optimizer = wrapper.optimizer  # torch's optimizer updates a tensor on any device
    return kept
