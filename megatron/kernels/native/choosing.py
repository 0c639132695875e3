"""The implementation of each operation on this machine, according to `--kernels`."""

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

# The folders of csrc/ops that an operation needs, if not just the folder of its name.
PARTS: Mapping[str, tuple[str, ...]] = types.MappingProxyType({"optimizer": ("adamw", "multi_tensor")})


def choose(requested: Mapping[str, str], device: torch.device, folder: Path | None = None) -> Kernels:
    """Chooses the implementation of each operation on a device.

    Args:
        requested: an implementation or `auto` for each operation.
        folder: as in `library`.

    Raises:
        ConfigError: a requested implementation is not available.
    """
    chosen: dict[str, Implementation] = {}
    missing: list[str] = []
    for operation in OPERATIONS:
        setting, available = requested.get(operation, AUTO), implementations(operation, device, folder)
        if setting == AUTO:
            chosen[operation] = fastest(operation, device.type, available)
            continue
        chosen[operation] = Implementation(setting)
        if chosen[operation] not in available:
            missing.append(operation)
    if missing:
        location = str(folder or default_folder()) + (f" ({FOLDER_VARIABLE})" if environment(FOLDER_VARIABLE) else "")
        raise ConfigError(
            f"--kernels requires csrc ({', '.join(missing)}), but {location} has no library with these for "
            f"{device.type}. Build it: {REBUILD}; or use --kernels auto."
        )
    return Kernels(**chosen)


def implementations(operation: str, device: torch.device, folder: Path | None = None) -> frozenset[Implementation]:
    """The available implementations of an operation on a device."""
    built = library(folder)
    available = {Implementation.TORCH}
    if built is not None and all(built.has(part, device) for part in PARTS.get(operation, (operation,))):
        available.add(Implementation.CSRC)
    return frozenset(available)
