"""Amounts of memory by what they are for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Amounts:
    """Bytes on one rank.

    Attributes:
        parameters: the weights that forward and backward compute with.
        gradients: what is held of the gradients when the update begins.
        optimizer: fp32 master weights, where they are a copy, and Adam's two moments.
        on_device: how many of all these bytes are in the memory of the device, not in that of the host; on a machine
            without an accelerator all of them.
    """

    parameters: int
    gradients: int
    optimizer: int
    on_device: int

    @property
    def total(self) -> int:
        """All bytes."""
        return self.parameters + self.gradients + self.optimizer
