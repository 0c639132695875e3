"""Which implementation of each operation is used: requested by flag, or by a table of measurements."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from megatron.config.sections.computation import CSRC, TORCH


class Implementation(str, Enum):
    """Where the code of an operation comes from."""

    TORCH = TORCH
    CSRC = CSRC


@dataclass(frozen=True)
class Kernels:
    """The implementation of each operation, handed to the layers on the mesh."""

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
        """With other implementations of some operations."""
        return dataclasses.replace(self, **changes)


TORCH_KERNELS = Kernels()


def is_installed(module: str) -> bool:
    """Whether a module can be found, without importing more than the package that it lies in."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False
