"""Micro-batches on the host and on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron import device
from megatron.model.interface.step_context import StepContext, StepSettings
from megatron.objective.base import Objective


class MicroBatch(Protocol):
    """The part of a micro-batch that the engine reads itself; the rest only concerns the objective.

    Shapes: sample_ids `[b]`, segment_ids `[b, s]`, both int64; prefix_mask `[b, s]` bool.
    """

    @property
    def sample_ids(self) -> np.ndarray:
        """Index of each sample in the sample order of the run."""

    @property
    def segment_ids(self) -> np.ndarray | None:
        """Document number of each token; None if documents are not separated."""

    @property
    def prefix_mask(self) -> np.ndarray | None:
        """Which tokens all others of their document may attend to; None if there are no prefixes."""


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device.

    Attributes:
        inputs: the inputs of the first layer.
        passed: the tensors from which each stage builds the `StepContext`.
        first_sample: the first sample id, as a Python integer.
        targets: the loss factor `[]`, then the objective's targets in the order of `target_names`.
        target_names: names of the targets.
    """

    inputs: tuple[torch.Tensor, ...]
    passed: tuple[torch.Tensor, ...]
    first_sample: int
    targets: tuple[torch.Tensor, ...]
    target_names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        objective: Objective,
        settings: StepSettings,
        scale: torch.Tensor,
        *,
        with_inputs: bool = True,
        with_targets: bool = True,
    ) -> DeviceBatch:
        """Copies what a stage uses to the device of `scale`, without synchronizing."""

        def move(array: np.ndarray) -> torch.Tensor:
            return device.copy_to_device(array, scale.device)

        targets = objective.targets(batch) if with_targets else {}
        inputs = objective.inputs(batch) if with_inputs else ()
        passed = [batch.sample_ids]
        if settings.needs_segments and batch.segment_ids is not None:
            passed.append(batch.segment_ids)
        if settings.has_prefixes and batch.prefix_mask is not None:
            passed.append(batch.prefix_mask)
        return cls(
            inputs=tuple(move(array) for array in inputs),
            passed=tuple(move(array) for array in passed) if with_inputs else (),
            first_sample=int(batch.sample_ids[0]),
            targets=(scale, *(move(array) for array in targets.values())) if with_targets else (),
            target_names=tuple(targets),
        )

    @classmethod
    def nothing(cls) -> DeviceBatch:
        """The batch of a middle stage, which uses no part of a micro-batch."""
        return cls((), (), 0, (), ())

    def context(self, settings: StepSettings, backward_scale: float) -> StepContext:
        """Builds the micro-batch's context."""
        return settings.context_of(self.passed, first_sample=self.first_sample, backward_scale=backward_scale)

    @property
    def network_input(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """The argument of the first layer."""
        return self.inputs[0] if len(self.inputs) == 1 else self.inputs
