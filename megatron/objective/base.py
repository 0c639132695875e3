"""What an objective is, and what it returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch


@dataclass(frozen=True)
class ObjectiveResult:
    """The objective of one micro-batch.

    Shapes: loss_sum and token_count `[]`; each metric `[n]`, with the `n` of `Objective.metric_sizes`.

    Attributes:
        loss_sum: sum of the losses of the counted tokens, in nats, float32, differentiable.
        token_count: tokens that counted.
        metrics: further sums, added over micro-batches and over the ranks whose tokens are summed.
    """

    loss_sum: torch.Tensor
    token_count: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Objective(Protocol):
    """Maps outputs and targets to a loss.

    The engine trains on the sum of the losses of a global batch over the number of its counted tokens.
    """

    @property
    def metric_sizes(self) -> Mapping[str, int]:
        """Name and length of every metric; the same on every rank."""

    def inputs(self, batch: Any) -> tuple[np.ndarray, ...]:
        """What the first layer of the network takes of a micro-batch; a single array is passed as it is."""

    def targets(self, batch: Any) -> Mapping[str, np.ndarray]:
        """What the objective compares the outputs with."""

    def token_count(self, batch: Any) -> float:
        """Tokens of a micro-batch that count, on the host and before the forward pass."""

    def __call__(self, outputs: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> ObjectiveResult:
        """The objective of one micro-batch."""
