"""Micro-batches on the host and on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from megatron import device
from megatron.model.interface.step_context import WHOLE_TENSORS, StepContext, StepSettings
from megatron.objective.base import Objective


class MicroBatch(Protocol):
    """The part of a micro-batch that the engine reads itself; the rest only concerns the objective.

    Besides `sample_ids`, it has the arrays that `StepSettings.passed` names, as attributes of these names.

    Shapes: sample_ids `[b]` int64; the others as in `StepContext`.
    """

    @property
    def sample_ids(self) -> np.ndarray:
        """Index of each sample in the sample order of the run."""


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device.

    Attributes:
        inputs: the inputs of the first layer; empty where that is not.
        passed: the tensors from which each stage builds the `StepContext`.
        shape: samples and tokens of each, the first two dimensions of hidden states.
        first_sample: the first sample id, as a Python integer; None if the host does not know it.
        targets: the factors of the loss sums over tokens and over samples `[2]`, then the objective's targets in the
            order of `target_names`.
        target_names: names of the targets.
    """

    inputs: tuple[torch.Tensor, ...]
    passed: tuple[torch.Tensor, ...]
    shape: tuple[int, int]
    first_sample: int | None
    targets: tuple[torch.Tensor, ...]
    target_names: tuple[str, ...]

    @classmethod
    def of(
        cls,
        batch: MicroBatch,
        objective: Objective,
        settings: StepSettings,
        target: torch.device,
        scales: torch.Tensor | None,
        *,
        with_inputs: bool = True,
    ) -> DeviceBatch:
        """Copies what a stage uses to a device, without synchronizing.

        Where ranks share the samples, that is what lies at this rank's places; samples that cannot be divided over
        them, or over those that split hidden states, are padded with tokens that have no loss.

        Args:
            scales: the factors of the loss sums; None where the loss is not seen, and no targets are needed.
        """
        inputs, split, places = objective.inputs(batch), settings.split, None
        samples, length = inputs[0].shape[:2]
        within = settings.sequence_parallel.size
        added = -length % within if split is None else split.padded(length, within) - length
        if split is None:
            length += added
        else:
            segments = getattr(batch, "segment_ids", None) if split.by_document else None
            places = split.positions(
                length + added, None if segments is None else _padded("segment_ids", segments, added)
            )
            length = places.shape[1]

        def move(name: str, array: np.ndarray) -> torch.Tensor:
            if array.ndim == 2:  # of samples, or the predicted places of each and what is taken there
                array = _padded(name, array, added)
                if places is not None and not name.endswith(WHOLE_TENSORS):
                    array = _taken(array, places)
            return device.copy_to_device(array, target)

        targets = {} if scales is None else objective.targets(batch)
        return cls(
            inputs=tuple(move("inputs", array) for array in inputs) if with_inputs else (),
            passed=tuple(move(name, getattr(batch, name)) for name in ("sample_ids", *settings.passed)),
            shape=(samples, length),
            first_sample=int(batch.sample_ids[0]),
            targets=() if scales is None else (scales, *(move(name, array) for name, array in targets.items())),
            target_names=tuple(targets),
        )

    def context(self, settings: StepSettings, backward_scale: float | torch.Tensor) -> StepContext:
        return settings.context_of(self.passed, first_sample=self.first_sample, backward_scale=backward_scale)

    @property
    def network_input(self) -> torch.Tensor | tuple[torch.Tensor, ...]:
        return self.inputs[0] if len(self.inputs) == 1 else self.inputs


def _padded(name: str, array: np.ndarray, added: int) -> np.ndarray:
    """Longer samples: zeros, and of segments one that follows the others. Shapes: `[b, s]` to `[b, s + added]`."""
    if not added:
        return array
    after = array[:, -1:] + 1 if name.endswith("segment_ids") else np.zeros_like(array[:, :1])
    return np.concatenate((array, after.repeat(added, axis=1)), axis=1)


def _taken(array: np.ndarray, places: np.ndarray) -> np.ndarray:
    """The values at some places of the samples. Shapes: array `[b, s]`, places `[b or 1, n]`; result `[b, n]`."""
    return np.take_along_axis(array, np.broadcast_to(places, (len(array), places.shape[1])), axis=1)
