"""Turns what was asked for by `--kernels` into the implementation of each operation on this machine."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron.config.sections.computation import AUTO, OF_APEX, OPERATIONS
from megatron.device import environment
from megatron.errors import ConfigError
from megatron.kernels.choice import Implementation, Kernels, is_installed
from megatron.kernels.native.library import FOLDER_VARIABLE, REBUILD, default_folder, library
from megatron.kernels.native.measured import fastest

# The folders of csrc/ops that an operation needs; its own name unless it is listed.
PARTS: Mapping[str, tuple[str, ...]] = types.MappingProxyType({"optimizer": ("adamw", "multi_tensor")})


def choose(requested: Mapping[str, str], device: torch.device, folder: Path | None = None) -> Kernels:
    """The implementation of each operation on a device.

    Args:
        requested: an implementation or `auto` for each operation.
        folder: where the library lies, as in `library`.

    Raises:
        ConfigError: an implementation was asked for that is not there.
    """
    chosen: dict[str, Implementation] = {}
    missing: dict[Implementation, list[str]] = {}
    for operation in OPERATIONS:
        wanted, available = requested.get(operation, AUTO), implementations(operation, device, folder)
        if wanted == AUTO:
            chosen[operation] = fastest(operation, device.type, available)
            continue
        chosen[operation] = Implementation(wanted)
        if chosen[operation] not in available:
            missing.setdefault(chosen[operation], []).append(operation)
    if missing:
        raise ConfigError([_not_there(kind, names, device, folder) for kind, names in missing.items()])
    return Kernels(**chosen)


def implementations(operation: str, device: torch.device, folder: Path | None = None) -> frozenset[Implementation]:
    """What could compute an operation on a device."""
    built = library(folder)
    available = {Implementation.TORCH}
    if built is not None and all(built.has(part, device) for part in PARTS.get(operation, (operation,))):
        available.add(Implementation.CSRC)
    if operation in OF_APEX and device.type == "cuda" and is_installed("apex.normalization"):
        available.add(Implementation.APEX)
    return frozenset(available)


def _not_there(kind: Implementation, operations: list[str], device: torch.device, folder: Path | None) -> str:
    names = ", ".join(operations)
    if kind is Implementation.APEX:
        return (
            f"--kernels asks for apex ({names}), which is not installed or has no GPU to run on. Install it from "
            "https://github.com/NVIDIA/apex, or use --kernels auto."
        )
    place = str(folder or default_folder()) + (f" ({FOLDER_VARIABLE})" if environment(FOLDER_VARIABLE) else "")
    return (
        f"--kernels asks for csrc ({names}), and {place} has no library with these for {device.type}. Build it: "
        f"{REBUILD}; or use --kernels auto."
    )
