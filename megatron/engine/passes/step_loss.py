"""The loss of a global batch, micro-batch by micro-batch.

In every layout, it is the sum of token losses of the global batch divided by the number of counted tokens, plus, for
objectives with a loss per sample, their sum divided by the number of samples. As gradients are averaged over
micro-batches and replicas, the token loss sum of a micro-batch is multiplied by (micro-batches * replicas / counted
tokens), and its sample loss sum by (micro-batches * replicas / samples).
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from megatron import device
from megatron.engine.micro_batch import DeviceBatch, MicroBatch
from megatron.engine.totals import StepTotals
from megatron.model.interface.auxiliary import AuxiliaryLosses
from megatron.model.interface.step_context import StepContext, StepSettings
from megatron.objective.base import AuxiliaryNetwork, Objective, Outputs, sum_sizes
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum


class StepLoss:
    """Computes the losses of the micro-batches of one global batch, and their totals.

    Args:
        objective: the objective of the batch.
        settings: shared by its micro-batches.
        loss_scale: the loss scale in fp16, else 1; if a tensor, its value at each use counts. `[]`.
        micro_batches: number of micro-batches on this rank.

    Attributes:
        totals: the sums so far.
        micro_batches: the argument, at least 1.
    """

    def __init__(
        self,
        objective: Objective,
        settings: StepSettings,
        mesh: ParallelMesh,
        loss_scale: float | torch.Tensor,
        micro_batches: int,
    ) -> None:
        self.objective, self.settings, self._mesh = objective, settings, mesh
        self._loss_scale, self.micro_batches = loss_scale, max(1, micro_batches)
        self.totals = StepTotals(sum_sizes(objective), mesh.device)
        self._target_names: tuple[str, ...] = ()

    @property
    def backward_scale(self) -> float | torch.Tensor:
        """The factor of a micro-batch's loss before backward. Shapes: `[]`."""
        return self._loss_scale / self.micro_batches

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss of a micro-batch times `backward_scale`. Shapes: `[]`."""
        scale = self.backward_scale
        return loss if not isinstance(scale, torch.Tensor) and scale == 1 else loss * scale

    def seed(self) -> torch.Tensor:
        """`backward_scale` as the initial gradient of a backward pass. Shapes: `[]` float32."""
        scale = self.backward_scale
        return scale if isinstance(scale, torch.Tensor) else torch.full((), scale, device=self._mesh.device)

    def prepare(
        self, micro_batches: Sequence[MicroBatch], *, with_inputs: bool, with_targets: bool
    ) -> list[DeviceBatch]:
        """Copies the arrays that this rank needs to the device, without synchronizing; collective over the ranks that
        compute the loss.

        Args:
            with_inputs: this rank has the first layer.
            with_targets: this rank computes the loss.
        """
        given = self.objective, self.settings, self._mesh.device
        scales = self._scales(micro_batches) if with_targets else None
        batches = [DeviceBatch.of(batch, *given, scales, with_inputs=with_inputs) for batch in micro_batches]
        self._target_names = batches[0].target_names if batches else ()
        return batches

    def _scales(self, micro_batches: Sequence[MicroBatch]) -> torch.Tensor:
        """The factors of the loss sums over tokens and over samples; collective over the ranks that compute the loss.

        Shapes: `[2]` float32.
        """
        mesh, objective = self._mesh, self.objective
        tokens = sum(objective.token_count(batch) for batch in micro_batches)
        samples = sum(len(batch.sample_ids) for batch in micro_batches)
        gradients = len(micro_batches) * mesh.gradient.size
        if mesh.batch.size == 1:  # divides on the host, with the same two roundings as on the device
            scales = [gradients * (1.0 / (1.0 if counted <= 0 else counted)) for counted in (tokens, samples)]
            return device.copy_to_device(np.array(scales, dtype=np.float32), mesh.device)
        counts = device.copy_to_device(np.array([tokens, samples], dtype=np.float64), mesh.device)
        counts = all_reduce_sum(counts, mesh.batch)
        return (gradients * counts.masked_fill(counts <= 0, 1.0).reciprocal()).to(torch.float32)

    def context_of(self, batch: DeviceBatch) -> StepContext:
        """The context of a micro-batch."""
        return batch.context(self.settings, self.backward_scale)

    def with_new_totals(self) -> StepLoss:
        """A copy with totals of zero."""
        other = copy.copy(self)
        other.totals = StepTotals(sum_sizes(self.objective), self._mesh.device)
        return other

    def loss(
        self,
        outputs: Outputs,
        targets: tuple[torch.Tensor, ...],
        auxiliary: Mapping[str, torch.Tensor] | None = None,
        extra_targets: Mapping[str, torch.Tensor] | None = None,
    ) -> torch.Tensor:
        """Computes the loss of a micro-batch and adds it to the totals.

        Args:
            targets: of a `DeviceBatch`.
            auxiliary: see `StepTotals.add`.
            extra_targets: further targets of the objective, by name.
        """
        scales, *tensors = targets
        named = {**dict(zip(self._target_names, tensors, strict=True)), **(extra_targets or {})}
        token_scale = scales[0]
        result = self.objective(outputs, named, self.scaled(token_scale))
        self.totals.add(result, auxiliary or {})
        loss = (result.loss_sum if result.minimized_sum is None else result.minimized_sum) * token_scale
        return loss if result.sample_sum is None else loss + result.sample_sum * scales[1]

    @property
    def auxiliary_network(self) -> AuxiliaryNetwork | None:
        """The objective's second network, run chunk by chunk along with the trained one; None if it has none."""
        network: AuxiliaryNetwork | None = getattr(self.objective, "auxiliary_network", None)
        return network

    def add_auxiliary(self, losses: AuxiliaryLosses) -> None:
        """Adds the auxiliary losses of layers to the totals."""
        self.totals.add_auxiliary(losses.sums())
