"""A micro-batch on its way from the host to the first layer and to the objective."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron import device
from megatron.model.interface.step_context import StepContext, StepSettings
from megatron.objective.base import Objective


class MicroBatch(Protocol):
    """What the engine itself reads of a micro-batch; the rest is between the data and the objective.

    Shapes: sample_ids `[b]`, segment_ids `[b, s]`, both int64.
    """

    @property
    def sample_ids(self) -> np.ndarray:
        """Number of each sample in the order of the whole run."""

    @property
    def segment_ids(self) -> np.ndarray | None:
        """The document of each token; None where documents are not told apart."""


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device.

    Attributes:
        inputs: what the first layer takes.
        passed: the tensors that a `StepContext` is made from.
        first_sample: the first sample id, on the host.
        targets: factor on the loss `[]`, then what the objective compares with, in the order of `target_names`.
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
        """Moves what a stage uses to the device of `scale`; the copies do not wait for the device."""

        def move(array: np.ndarray) -> torch.Tensor:
            return device.copy_to_device(array, scale.device)

        targets = objective.targets(batch) if with_targets else {}
        inputs = objective.inputs(batch) if with_inputs else ()
        passed = [batch.sample_ids]
        if settings.needs_segments and batch.segment_ids is not None:
            passed.append(batch.segment_ids)
        return cls(
            inputs=tuple(move(array) for array in inputs),
            passed=tuple(move(array) for array in passed) if with_inputs else (),
            first_sample=int(batch.sample_ids[0]),
            targets=(scale, *(move(array) for array in targets.values())) if with_targets else (),
            target_names=tuple(targets),
        )

    @classmethod
    def nothing(cls) -> DeviceBatch:
        """What a stage gets that uses no part of a micro-batch."""
        return cls((), (), 0, (), ())

    def context(self, settings: StepSettings, backward_scale: float) -> StepContext:
        """The context of the micro-batch."""
        return settings.context(*self.passed, first_sample=self.first_sample, backward_scale=backward_scale)

    @property
    def network_input(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        """What the first layer is called with."""
        return self.inputs[0] if len(self.inputs) == 1 else self.inputs
