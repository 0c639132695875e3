"""The interface of an objective and its result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from megatron.objective.metric import MetricSpec

Outputs = torch.Tensor | tuple[torch.Tensor, ...]  # of a network


@dataclass(frozen=True)
class ObjectiveResult:
    """The objective of one micro-batch.

    Shapes: loss_sum, token_count, minimized_sum and sample_sum `[]`; each of the metrics as many elements as
    `sum_sizes` says.

    Attributes:
        loss_sum: sum of the losses of the counted tokens, in nats, float32: what is logged and evaluated.
        token_count: number of counted tokens.
        metrics: sums and weights of metrics, and statistics, by name; they are summed over micro-batches and over the
            ranks of `mesh.loss`.
        minimized_sum: the sum to minimize, differentiable; None if it is `loss_sum`.
        sample_sum: sum of losses of which each sample has one, differentiable; None if there are none.
    """

    loss_sum: torch.Tensor
    token_count: torch.Tensor
    metrics: Mapping[str, torch.Tensor] = field(default_factory=dict)
    minimized_sum: torch.Tensor | None = None
    sample_sum: torch.Tensor | None = None


class AuxiliaryNetwork(Protocol):
    """A network that runs beside the one that is trained, without gradients, divided over the same chunks."""

    @property
    def output_name(self) -> str:
        """The name under which the objective is given the outputs."""

    def empty_hidden(self, samples: int, tokens: int, like: torch.Tensor) -> torch.Tensor:
        """Room for the hidden states between chunks, on the device of a tensor. Shapes: see `StepSettings`."""

    def forward(self, chunk: int, hidden: Any, passed: Sequence[torch.Tensor]) -> torch.Tensor:
        """Runs a chunk, on the output of the chunk before or the micro-batch's inputs.

        Args:
            passed: the tensors of the micro-batch's context.
        """


class Objective(Protocol):
    """Maps outputs and targets to a loss.

    The engine minimizes the sum over a global batch divided by the sum of `token_count` over it, plus the sum over
    samples divided by their number.
    """

    @property
    def metrics(self) -> Mapping[str, MetricSpec]:
        """The metrics by name; the same on every rank."""

    @property
    def statistics(self) -> Mapping[str, int]:
        """Name and length of the sums that are no metrics yet, such as those of layers; the same on every rank."""

    def inputs(self, batch: Any) -> tuple[np.ndarray, ...]:
        """The inputs of the network's first layer; a single array is passed without a tuple."""

    def targets(self, batch: Any) -> Mapping[str, np.ndarray]:
        """The arrays that the objective compares with the outputs."""

    def token_count(self, batch: Any) -> float:
        """What a micro-batch adds to the number that the minimized sum is divided by: its counted tokens, unless the
        objective weighs them otherwise; computed on the host before the forward pass.
        """

    def __call__(
        self, outputs: Any, targets: Mapping[str, torch.Tensor], factor: torch.Tensor | None = None
    ) -> ObjectiveResult:
        """The objective of one micro-batch.

        Shapes: factor `[]`.

        Args:
            factor: what the engine multiplies the minimized sum by before backward, for objectives that compute
                gradients themselves; it does not affect the result.
        """


def sum_sizes(objective: Objective) -> dict[str, int]:
    """Name and length of all that is summed over a global batch besides losses and tokens."""
    return {name: spec.size for name, spec in objective.metrics.items()} | dict(objective.statistics)
