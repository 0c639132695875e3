"""The compiled operations of `csrc/ops`: finds the library, checks that it fits this machine, and loads it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from megatron import log
from megatron.device import environment
from megatron.kernels import (
    activations,
    cross_entropy,
    dropout_add,
    embedding,
    initial_values,
    multi_tensor,
    norms,
    optimizer,
    rotary,
)
from megatron.kernels.attention import softmax as attention_softmax

INTERFACE = 1  # raised when the signature of an operation changes, so that an older library is not used
LIBRARY, RECORD = "libmegatron_ops.so", "build.json"
FOLDER_VARIABLE = "MEGATRON_KERNELS"
REBUILD = "python tools/build_kernels.py"

# What has to be told to torch once an operation is loaded, by the operation's folder in csrc/ops.
_REGISTRATIONS: Mapping[str, Callable[[], None]] = {
    "activation": activations.register,
    "adamw": optimizer.register,
    "cross_entropy": cross_entropy.register,
    "dropout_add": dropout_add.register,
    "embedding": embedding.register,
    "initial_values": initial_values.register,
    "multi_tensor": multi_tensor.register,
    "norm": norms.register,
    "rotary": rotary.register,
    "softmax": attention_softmax.register,
}


@dataclass(frozen=True)
class Library:
    """A library that was built.

    Attributes:
        operations: the folders of csrc/ops that it contains.
        architectures: compute capabilities of GPUs that it has code for, such as 90; empty if it was built without
            CUDA.
    """

    folder: Path
    interface: int
    torch_version: str
    machine: str
    operations: tuple[str, ...]
    architectures: tuple[int, ...]

    def has(self, operation: str, device: torch.device | str) -> bool:
        """Whether the library can compute an operation on a device."""
        device = torch.device(device)
        if operation not in self.operations or device.type not in ("cpu", "cuda"):
            return False
        return device.type == "cpu" or self._has_code_for(*torch.cuda.get_device_capability(device))

    def _has_code_for(self, major: int, minor: int) -> bool:
        # Code for one capability runs on later minor versions of the same major one.
        return any(code // 10 == major and code % 10 <= minor for code in self.architectures)


def library(folder: Path | None = None) -> Library | None:
    """The library that is built for this machine, loaded; None without one. Why one is not used is said once.

    Args:
        folder: where it lies; None for the folder of the package, or the one that MEGATRON_KERNELS names.
    """
    return _load((folder or default_folder()).resolve())


def default_folder() -> Path:
    """Where libraries are built and looked for."""
    named = environment(FOLDER_VARIABLE)
    return Path(named) if named else Path(__file__).parent.parent / "binaries"


@cache
def _load(folder: Path) -> Library | None:
    if not (folder / RECORD).is_file():
        return None
    try:
        record = json.loads((folder / RECORD).read_text("utf-8"))
        found = Library(
            folder,
            interface=record["interface"],
            torch_version=record["torch"],
            machine=record["machine"],
            operations=tuple(record["operations"]),
            architectures=tuple(record["architectures"]),
        )
        reason = _unfit(found)
        if reason is None:
            torch.ops.load_library(str(folder / LIBRARY))
    except (OSError, ValueError, KeyError, TypeError) as failure:
        reason = f"it cannot be loaded ({type(failure).__name__}: {str(failure).splitlines()[0][:200]})"
    if reason is not None:
        log.warning(f"the compiled kernels in {folder} are not used: {reason}. Build them again: {REBUILD}")
        return None
    for operation, register in _REGISTRATIONS.items():
        if operation in found.operations:
            register()
    return found


def _unfit(library: Library) -> str | None:
    """Why a library must not be loaded here."""
    if library.torch_version != torch.__version__:
        return f"they were built for torch {library.torch_version}, and this is torch {torch.__version__}"
    if library.machine != platform.machine():
        return f"they were built for {library.machine}, and this machine is {platform.machine()}"
    if library.interface != INTERFACE:
        return f"they have interface {library.interface}, and this version of the project needs {INTERFACE}"
    return None
