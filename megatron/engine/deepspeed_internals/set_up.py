"""What is changed of DeepSpeed before and after it is initialized, and around its messages."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import deepspeed
import torch

from megatron.engine.ds_config import sub_groups_to_keep


def skip_shared_memory_build() -> None:
    """Keeps DeepSpeed from compiling CPU collectives as it joins: half a minute, and an error without a compiler.

    The table that says so replaces DeepSpeed's own, which tries a compiler for every operation when it is first read.
    """
    deepspeed.ops.__compatible_ops__ = {"deepspeed_shm_comm": False}


def skip_optimizer_check() -> None:
    """Keeps DeepSpeed from comparing each optimizer with its Muon, which compiles functions, and from a warning.

    The reduction of gradients at ZeRO 1 and 2 makes the comparison as well.
    """
    deepspeed.runtime.engine.is_zero_supported_optimizer = lambda optimizer: True
    deepspeed.runtime.compiler.compile = lambda *_, **__: lambda function: function


@contextlib.contextmanager
def replaced_backend(wrap: Callable[[Any], Any]) -> Iterator[None]:
    """Has DeepSpeed send its messages in the block through what `wrap` makes of its backend, if it has one."""
    backend = deepspeed.comm.comm.cdb
    deepspeed.comm.comm.cdb = None if backend is None else wrap(backend)
    try:
        yield
    finally:
        deepspeed.comm.comm.cdb = backend


def keep_on_device(wrapper: Any, ratio: float, device: torch.device) -> list[int]:
    """Moves all but this share of the master weights and their gradients back to the device, before the first step, and
    returns the sub-groups that were moved.

    DeepSpeed's own second optimizer, for the part on the device, wants DeepSpeedCPUAdam, which has to be compiled,
    divides sub-groups by their number, whatever their size, and never changes the learning rate of its first group.
    Here one AdamW of torch updates each sub-group where it is (`runtime/zero/stage3.py`, `_optimizer_step`).
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
    wrapper.backup_optimizer = wrapper.optimizer  # torch's updates a tensor where it is
    return kept
