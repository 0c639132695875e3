"""The implementation of each operation: set by flag, or chosen by a table of measurements."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megatron.config.sections.computation import CSRC, TORCH


class Implementation(str, Enum):
    """An implementation of an operation."""

    TORCH = TORCH
    CSRC = CSRC


@dataclass(frozen=True)
class Kernels:
    """The implementation of each operation, passed to the layers on the mesh."""

    softmax: Implementation = Implementation.TORCH
    norm: Implementation = Implementation.TORCH
    activation: Implementation = Implementation.TORCH
    dropout_add: Implementation = Implementation.TORCH
    rotary: Implementation = Implementation.TORCH
    cross_entropy: Implementation = Implementation.TORCH
    optimizer: Implementation = Implementation.TORCH
    embedding: Implementation = Implementation.TORCH
    initial_values: Implementation = Implementation.TORCH

    @classmethod
    def all(cls, implementation: Implementation) -> Kernels:
        return cls(**{field.name: implementation for field in dataclasses.fields(cls)})

    def replace(self, changes: Mapping[str, Implementation]) -> Kernels:
        """Returns a copy with other implementations of some operations."""
        return dataclasses.replace(self, **changes)


TORCH_KERNELS = Kernels()


def is_installed(module: str) -> bool:
    """True if a module can be found; imports at most its parent package."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
