"""The library of compiled operations: finds it, checks that it fits this machine, and loads it."""

from __future__ import annotations

import hashlib
import platform
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from megatron import log
from megatron.device import environment
from megatron.files.plain import read_plain_json
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
from megatron.processor import cpu_features

INTERFACE = 4  # incremented when the signature of an operation changes, so that older libraries are not used
LIBRARY, RECORD = "libmegatron_ops.so", "build.json"
FOLDER_VARIABLE = "MEGATRON_KERNELS"
REBUILD = "python tools/build_kernels.py"

# In a checkout only; an installed package uses the library that was built with it.
SOURCES = Path(__file__).resolve().parents[3] / "csrc" / "ops"
# Registration with torch after loading, by the operation's folder in csrc/ops.
_REGISTRATIONS: Mapping[str, Callable[[], None]] = types.MappingProxyType(
    {
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
)


@dataclass(frozen=True)
class Library:
    """A built library.

    Attributes:
        digest: SHA-256 of the library file, in hexadecimal.
        sources: `digest_of_sources` of the csrc/ops that it was built from.
        operations: the folders of csrc/ops that it contains.
        architectures: compute capabilities of its GPU code, such as 90; empty if built without CUDA.
        cpu_features: required instruction sets; empty if its code selects them at run time.
    """

    folder: Path
    interface: int
    torch_version: str
    machine: str
    digest: str
    operations: tuple[str, ...]
    architectures: tuple[int, ...]
    cpu_features: tuple[str, ...] = ()
    sources: str = ""

    @classmethod
    def from_json(cls, folder: Path, record: Mapping[str, Any]) -> Library:
        """Reads the record of `to_json`.

        Raises:
            KeyError, TypeError, ValueError: a damaged record.
        """
        return cls(
            folder,
            interface=record["interface"],
            torch_version=record["torch"],
            machine=record["machine"],
            digest=record["sha256"],
            operations=tuple(record["operations"]),
            architectures=tuple(int(code) for code in record["architectures"]),
            cpu_features=tuple(record["cpu_features"]),
            sources=record.get("sources", ""),
        )

    def to_json(self) -> dict[str, Any]:
        """The record stored with the library."""
        return {
            "interface": self.interface,
            "torch": self.torch_version,
            "machine": self.machine,
            "sha256": self.digest,
            "sources": self.sources,
            "operations": list(self.operations),
            "architectures": list(self.architectures),
            "cpu_features": list(self.cpu_features),
        }

    def has(self, operation: str, device: torch.device | str) -> bool:
        """True if the library has an operation for a device."""
        device = torch.device(device)
        if operation not in self.operations or device.type not in ("cpu", "cuda"):
            return False
        return device.type == "cpu" or self._has_code_for(*torch.cuda.get_device_capability(device))

    def _has_code_for(self, major: int, minor: int) -> bool:
        # Code for one capability runs on later minor versions of the same major one.
        return any(code // 10 == major and code % 10 <= minor for code in self.architectures)


def library(folder: Path | None = None) -> Library | None:
    """Loads the library for this machine; None without one. The reason for rejecting one is logged once.

    Args:
        folder: its folder; None for `default_folder()`.
    """
    return _load((folder or default_folder()).resolve())


def default_folder() -> Path:
    """The folder of the library: the package's, or the value of MEGATRON_KERNELS."""
    named = environment(FOLDER_VARIABLE)
    return Path(named) if named else Path(__file__).parent.parent / "binaries"


def digest_of(path: Path) -> str:
    """SHA-256 of a file, in hexadecimal."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def digest_of_sources(sources: Path) -> str:
    """SHA-256 of the source files in csrc/ops, in hexadecimal; empty if none."""
    files = sorted(path for path in sources.rglob("*") if path.suffix in (".cpp", ".cu", ".h"))
    digest = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        digest.update(f"{path.relative_to(sources).as_posix()} {len(content)} ".encode() + content)
    return digest.hexdigest() if files else ""


@cache
def _load(folder: Path) -> Library | None:
    if not (folder / RECORD).is_file():
        return None
    checked = _checked(folder)
    if isinstance(checked, str):
        log.warning(f"the library of compiled kernels in {folder} is not used: {checked}. Build it again: {REBUILD}")
        return None
    return checked


def _checked(folder: Path) -> Library | str:
    """Loads the library in a folder; returns it, or the reason why it cannot be used."""
    try:
        library = Library.from_json(folder, read_plain_json(folder / RECORD))
    except (OSError, ValueError, KeyError, TypeError):
        return f"its record {RECORD} is damaged"
    reason = _unfit(library)
    if reason is not None:
        return reason
    try:
        # Loading a truncated file, or one of another build, would crash the process.
        if digest_of(folder / LIBRARY) != library.digest:
            return f"{LIBRARY} does not match {RECORD}"
        if loaded := [path for path in torch.ops.loaded_libraries if Path(path).name == LIBRARY]:
            return f"this process has loaded {loaded[0]}, and registering operations twice would crash it"
        torch.ops.load_library(str(folder / LIBRARY))
        for operation in library.operations:
            _REGISTRATIONS[operation]()
    except (OSError, RuntimeError, KeyError) as failure:
        return f"it cannot be loaded ({str(failure).splitlines()[0][:200]})"
    return library


def _unfit(library: Library) -> str | None:
    """The reason why a library must not be loaded here; None if it may."""
    if library.torch_version != torch.__version__:
        return f"it was built for torch {library.torch_version}, and this is torch {torch.__version__}"
    if library.machine != platform.machine():
        return f"it was built for {library.machine}, and this machine is {platform.machine()}"
    if library.interface != INTERFACE:
        return f"it has interface {library.interface}, and this version of the project requires {INTERFACE}"
    expected = digest_of_sources(SOURCES)
    if expected and library.sources != expected:
        return f"its sources had digest {library.sources[:12] or 'unknown'}, and {SOURCES} has {expected[:12]}"
    missing = sorted(set(library.cpu_features) - cpu_features())
    if missing:
        return f"it was built with --native for a CPU with {', '.join(missing[:5])}, which this one lacks"
    return None
