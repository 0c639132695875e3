"""Turns what was asked for by `--kernels` into the implementation of each operation on this machine."""

from __future__ import annotations

import types
from collections.abc import Mapping
from pathlib import Path

import torch

from megatron.config.sections.computation import AUTO, OPERATIONS
from megatron.device import environment
from megatron.errors import ConfigError
from megatron.kernels.choice import Implementation, Kernels
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
    missing: list[str] = []
    for operation in OPERATIONS:
        wanted, available = requested.get(operation, AUTO), implementations(operation, device, folder)
        if wanted == AUTO:
            chosen[operation] = fastest(operation, device.type, available)
            continue
        chosen[operation] = Implementation(wanted)
        if chosen[operation] not in available:
            missing.append(operation)
    if missing:
        place = str(folder or default_folder()) + (f" ({FOLDER_VARIABLE})" if environment(FOLDER_VARIABLE) else "")
        raise ConfigError(
            f"--kernels asks for csrc ({', '.join(missing)}), and {place} has no library with these for {device.type}. "
            f"Build it: {REBUILD}; or use --kernels auto."
        )
    return Kernels(**chosen)


def implementations(operation: str, device: torch.device, folder: Path | None = None) -> frozenset[Implementation]:
    """What could compute an operation on a device."""
    built = library(folder)
    available = {Implementation.TORCH}
    if built is not None and all(built.has(part, device) for part in PARTS.get(operation, (operation,))):
        available.add(Implementation.CSRC)
    return frozenset(available)
