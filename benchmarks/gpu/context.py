"""The context of every part: its device, its size, and the destination of its figures."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path

import torch

from benchmarks.gpu.records import Recorder

FULL, TINY = "full", "tiny"
DECIDING = ("graphs", "plain", "ours")  # the contenders that decide whether ours is the fastest, and why


@dataclass(frozen=True)
class Context:
    """The settings of a part.

    Attributes:
        output: folder of results and logs.
        scale: `full`, or `tiny` to try the harness where there is no GPU.
        seconds: how long the part may take; it stops early where it can.
        kernels: the implementations that our runs use, as `--kernels` takes them; None for csrc where it is
            built, beside torch.
        contenders: which of `training.CONTENDERS` are compared.
        contender: the one that this process is; None where it is the part itself.
    """

    part: str
    output: Path
    device: torch.device
    scale: str = FULL
    seconds: float = 600.0
    kernels: str | None = None
    contenders: tuple[str, ...] = DECIDING
    contender: str | None = None
    scratch: Path = field(default_factory=lambda: Path(tempfile.mkdtemp(prefix="megatron-gpu-")))

    @property
    def is_tiny(self) -> bool:
        """True for a trial of the harness only."""
        return self.scale == TINY

    @property
    def recorder(self) -> Recorder:
        """The destination of the figures."""
        return Recorder(self.output, self.part)
