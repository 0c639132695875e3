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
    """The part of a micro-batch that the engine reads; the rest is for the objective.

    Besides `sample_ids`, it has an attribute for each array in `StepSettings.passed`.

    Shapes: sample_ids `[b]` int64; the others as in `StepContext`.
    """

    @property
    def sample_ids(self) -> np.ndarray:
        """Index of each sample in the sample order of the run."""


@dataclass(frozen=True)
class DeviceBatch:
    """A micro-batch on the device.

    Attributes:
        inputs: the inputs of the first layer; empty on ranks without it.
        passed: the tensors that each stage builds the `StepContext` from.
        shape: number of samples, and of tokens in each: the first two dimensions of hidden states.
        first_sample: the first sample id, as a Python integer; None if it is only on the device.
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
        """Copies the arrays that a stage uses to a device, without synchronizing.

        If ranks share the samples, only this rank's positions are copied. Samples that cannot be divided over these
        ranks, or over those that split hidden states, are padded with tokens that have no loss.

        Args:
            scales: the factors of the loss sums; None on ranks that do not compute the loss, which need no targets.
        """
        inputs, split, positions = objective.inputs(batch), settings.split, None
        samples, length = inputs[0].shape[:2]
        within = settings.sequence_parallel.size
        padding = -length % within if split is None else split.padded(length, within) - length
        if split is None:
            length += padding
        else:
            segments = getattr(batch, "segment_ids", None) if split.by_document else None
            segments = None if segments is None else _padded("segment_ids", segments, padding)
            positions = split.positions(length + padding, segments)
            length = positions.shape[1]

        def move(name: str, array: np.ndarray) -> torch.Tensor:
            if array.ndim == 2:  # by sample: tokens, or predicted positions and their values
                array = _padded(name, array, padding)
                if positions is not None and not name.endswith(WHOLE_TENSORS):
                    array = _selected(array, positions)
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


def _padded(name: str, array: np.ndarray, count: int) -> np.ndarray:
    """Pads samples with zeros; segment ids with a new segment. Shapes: `[b, s]` to `[b, s + count]`."""
    if not count:
        return array
    value = array[:, -1:] + 1 if name.endswith("segment_ids") else np.zeros_like(array[:, :1])
    return np.concatenate((array, value.repeat(count, axis=1)), axis=1)


def _selected(array: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Shapes: array `[b, s]`, positions `[b or 1, n]`; result `[b, n]`."""
    return np.take_along_axis(array, np.broadcast_to(positions, (len(array), positions.shape[1])), axis=1)
