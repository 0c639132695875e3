"""The interface of an objective and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from megatron.objective.metric import MetricSpec

Outputs = torch.Tensor | tuple[torch.Tensor, ...]  # a network's outputs


@dataclass(frozen=True)
class ObjectiveResult:
    """The objective of one micro-batch.

    Shapes: loss_sum, token_count, minimized_sum and sample_sum `[]`; metrics as given by `sum_sizes`.

    Attributes:
        loss_sum: sum of the losses of the counted tokens, in nats, float32; logged and evaluated.
        token_count: number of counted tokens.
        metrics: sums and weights of metrics, and statistics, by name; they are summed over micro-batches and over the
            ranks of `mesh.loss`.
        minimized_sum: the sum to minimize, differentiable; None if it is `loss_sum`.
        sample_sum: sum of per-sample losses, differentiable; None if none.
    """

    loss_sum: torch.Tensor
    token_count: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    minimized_sum: torch.Tensor | None = None
    sample_sum: torch.Tensor | None = None


class AuxiliaryNetwork(Protocol):
    """A second network that runs along with the trained one, without gradients, divided into the same chunks."""

    @property
    def output_name(self) -> str:
        """The name of its outputs among the objective's targets."""

    def empty_hidden(self, samples: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """Allocates hidden states between chunks, on the device of `like`. Shapes: see `StepSettings`."""

    def forward(self, chunk: int, hidden: Any, passed: Sequence[torch.Tensor]) -> torch.Tensor:
        """Runs a chunk on the output of the previous chunk, or on the micro-batch's inputs.

        Args:
            passed: the tensors of the micro-batch's context.
        """


class Objective(Protocol):
    """Maps outputs and targets to a loss.

    The engine minimizes the sum over a global batch divided by its sum of `token_count`, plus the mean over samples of
    the per-sample losses.
    """

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The metrics by name; the same on every rank."""

    @property
    def statistics(self) -> Mapping[str, int]:
        """Name and length of other sums, such as those recorded by layers; the same on every rank."""

    def inputs(self, batch: Any) -> tuple[np.ndarray, ...]:
        """The inputs of the network's first layer; a single array is passed without a tuple."""

    def targets(self, batch: Any) -> Mapping[str, np.ndarray]:
        """The arrays that the objective compares with the outputs."""

    def token_count(self, batch: Any) -> float:
        """A micro-batch's part of the divisor of the minimized sum: its counted tokens, unless the objective weights
        them otherwise; computed on the host before the forward pass.
        """

    def __call__(
        self, outputs: Any, targets: Mapping[str, torch.Tensor], factor: torch.Tensor | None = None
    ) -> ObjectiveResult:
        """The objective of one micro-batch.

        Shapes: factor `[]`.

        Args:
            factor: the engine's factor of the minimized sum before backward, for objectives that compute gradients
                themselves; does not affect the result.
        """


def sum_sizes(objective: Objective) -> dict[str, int]:
    """Name and length of all sums over a global batch besides losses and tokens."""
    return {name: spec.size for name, spec in objective.metrics.items()} | dict(objective.statistics)
