"""Sums over a global batch, accumulated on the device and copied to the host once."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from megatron import device
from megatron.engine.gradients.finite_check import FiniteCheck
from megatron.engine.gradients.gradient_stats import GradientStats
from megatron.engine.gradients.update_gate import StepVerdict, UpdateDecision
from megatron.objective.base import Objective, ObjectiveResult, sum_sizes
from megatron.objective.metric import StepMetrics
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_sum


class StepTotals:
    """Sums over the micro-batches of a global batch: losses, counted tokens, and sums of the objective and of layers.

    Args:
        sizes: names and lengths of the sums of objective and layers, see `sum_sizes`.
    """

    def __init__(self, sizes: Mapping[str, int], on_device: torch.device) -> None:
        self._sizes, self._device = dict(sizes), on_device
        self._sums: torch.Tensor | None = None  # None before the first micro-batch
        self._is_reduced = False

    def add(self, result: ObjectiveResult, auxiliary: Mapping[str, torch.Tensor]) -> None:
        """Adds one micro-batch, without synchronizing.

        Args:
            auxiliary: auxiliary losses of layers, added if `sizes` has their names.
        """
        parts = [result.loss_sum.detach().reshape(1), result.token_count.reshape(1)]
        for name, size in self._sizes.items():
            value = result.metrics.get(name, auxiliary.get(name))
            parts.append(parts[0].new_zeros(size) if value is None else value.reshape(size))
        if all(part.dtype is torch.float32 for part in parts):
            sums = torch.cat(parts).to(torch.float64)
        else:
            sums = torch.cat([part.to(torch.float64) for part in parts])
        self._sums = sums if self._sums is None else self._sums.add_(sums)

    @property
    def sums(self) -> torch.Tensor:
        """The local sums so far. Shapes: `[2 + sums]` float64."""
        if self._sums is None:
            self._sums = torch.zeros(2 + sum(self._sizes.values()), dtype=torch.float64, device=self._device)
        return self._sums

    def add_sums(self, sums: torch.Tensor) -> None:
        """Adds the sums of other totals. Shapes: `[2 + sums]` float64."""
        self.sums.add_(sums)

    def add_auxiliary(self, auxiliary: Mapping[str, torch.Tensor]) -> None:
        """Adds the auxiliary losses of layers on a stage that does not compute the objective."""
        offset = 2
        for name, size in self._sizes.items():
            if name in auxiliary:
                self.sums[offset : offset + size] += auxiliary[name].reshape(size).to(self.sums)
            offset += size

    def over_ranks(self, mesh: ParallelMesh) -> torch.Tensor:
        """The sums of the global batch, on every rank; the first call is collective.

        Shapes: `[2 + sums]` float64.
        """
        if not self._is_reduced:
            self._is_reduced = True
            all_reduce_sum(all_reduce_sum(self.sums, mesh.loss), mesh.pp)
        return self.sums

    def by_name(self, mesh: ParallelMesh) -> dict[str, torch.Tensor]:
        """The named sums of the global batch, on every rank; collective like `over_ranks`.

        Shapes: each `[n]` float64, with its length `n` in `sizes`.
        """
        sums = self.over_ranks(mesh)[2:]
        return dict(zip(self._sizes, sums.split(list(self._sizes.values())), strict=True))


class StepResult:
    """The result of one optimizer step; equal on all ranks.

    The values are copied to the host while the device continues; the first read waits for the copy.

    Args:
        values: the global 2-norm of the gradient before clipping, `StepTotals.over_ranks`, and `GradientStats.measure`.
            `[3 + sums + gradient stats]` float64.
        objective: names the sums.
        sample_count: samples of the global batch.
        micro_batch_size: samples of a micro-batch.
        loss_scale: the loss scale (1 outside fp16).
        verdict: the decision on the update; None if it was applied.
        gradients: names the gradient stats; None if only the norm was measured.
        finite_check: this rank's check of its own loss and gradients, if it was made.
    """

    def __init__(
        self,
        values: torch.Tensor,
        objective: Objective,
        *,
        sample_count: int,
        micro_batch_size: int = 1,
        loss_scale: float | torch.Tensor = 1.0,
        verdict: StepVerdict | None = None,
        gradients: GradientStats | None = None,
        finite_check: FiniteCheck | None = None,
    ) -> None:
        self.finite_check = finite_check
        self.sample_count = sample_count
        self._micro_batch_size, self._gradients = micro_batch_size, gradients
        self._verdict = verdict
        self._specs, self._sizes = objective.metrics, sum_sizes(objective)
        self._scale = loss_scale
        if isinstance(loss_scale, torch.Tensor):
            values = torch.cat([values, loss_scale.reshape(1)])
        self._values = device.HostCopy(values)

    @property
    def loss_scale(self) -> float:
        """The loss scale after the step."""
        return float(self._values.read()[-1]) if isinstance(self._scale, torch.Tensor) else self._scale

    @property
    def skipped(self) -> bool:
        """True if the update was skipped because an fp16 gradient overflowed."""
        return self._verdict is not None and self._verdict.is_overflow

    @property
    def is_spike(self) -> bool:
        """True if the update was skipped because loss or norm were far above the recent ones."""
        return self._verdict is not None and self._verdict.decision is UpdateDecision.SPIKE

    @property
    def consecutive_bad(self) -> int:
        """Number of consecutive bad steps up to this one, see `StepVerdict.consecutive_bad`."""
        return 0 if self._verdict is None else self._verdict.consecutive_bad

    @property
    def loss(self) -> float | None:
        """Mean loss per counted token of the global batch, in nats; None if no token counts."""
        loss_sum, tokens = self._values.read()[1:3].tolist()
        return None if tokens == 0 else loss_sum / tokens

    @property
    def token_count(self) -> int:
        """Tokens counted in the loss; 0 if the count is not finite."""
        tokens = float(self._values.read()[2])
        return round(tokens) if math.isfinite(tokens) else 0

    @property
    def gradient_norm(self) -> float:
        """Global 2-norm of the gradient before clipping."""
        return float(self._values.read()[0])

    @property
    def sums(self) -> dict[str, list[float]]:
        """The sums of the objective and of layers, by name."""
        parts = self._values.read()[3 : 3 + sum(self._sizes.values())].split(list(self._sizes.values()))
        return {name: part.tolist() for name, part in zip(self._sizes, parts, strict=True)}

    @property
    def metrics(self) -> StepMetrics:
        """The metrics of the objective and of the gradients, without loss and norm."""
        sums = self.sums
        metrics = StepMetrics()
        for name, spec in self._specs.items():
            metrics.add(*spec.metrics(name, sums[name]))
        if self._gradients is not None:
            stats = self._values.read()[3 + sum(self._sizes.values()) :]
            metrics.add(*self._gradients.metrics(stats, self._micro_batch_size, self.sample_count))
        return metrics
