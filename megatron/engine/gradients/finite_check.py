"""Locates NaN and infinity in each rank's own loss and gradients, before the sum over ranks hides their origin."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from megatron.engine.gradients.gradient_stats import layer_of
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_gather_json

_DESCRIBED = 3


class FiniteCheck:
    """One rank's loss and the largest magnitude in each gradient of a step, finite only if all elements are.

    They stay on the device unless the step is bad, so that good steps do not wait for them.
    """

    def __init__(self) -> None:
        self._buckets: list[tuple[Sequence[nn.Parameter], torch.Tensor]] = []
        self._loss: torch.Tensor

    @torch.no_grad()
    def record(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """Records a bucket of gradients before it is summed over ranks."""
        if gradients:
            self._buckets.append((parameters, torch.stack(torch._foreach_norm(list(gradients), math.inf))))

    def is_wrong(self, loss_sum: torch.Tensor) -> torch.Tensor:
        """True if this rank's loss or a recorded gradient is not finite. Shapes: `[1]`; result `[]`."""
        self._loss = loss_sum.clone()
        return torch.cat([self._loss, *(largest for _, largest in self._buckets)]).isfinite().logical_not().any()

    def describe(self, layers: Sequence[str], mesh: ParallelMesh) -> str:
        """Describes the ranks with NaN or infinity, those nearest to the loss first, because a backward pass spreads it
        from there; collective over all ranks.

        Args:
            layers: global names of the layers of the whole network.
        """
        gathered = all_gather_json(self._entry(layers, mesh), mesh.control)
        entries = sorted(filter(None, gathered), key=lambda entry: -entry[0])  # type: ignore[no-any-return]
        if not entries:
            return "No rank had NaN or infinity in its own loss or gradients before they were summed"
        left = len(entries) - _DESCRIBED
        more = f"; and {left} more ranks" if left > 0 else ""
        return f"Before the sum over ranks: {'; '.join(text for _, text in entries[:_DESCRIBED])}{more}"

    def _entry(self, layers: Sequence[str], mesh: ParallelMesh) -> tuple[int, str] | None:
        rank = f"rank {mesh.world.rank}" + (f" ({mesh.place})" if mesh.place else "")
        if not math.isfinite(self._loss):
            return len(layers), f"{rank} has a loss of {float(self._loss)}"
        indices = {name: index for index, name in enumerate(layers)}
        wrong: dict[str, tuple[int, int, float]] = {}
        for number, (parameters, largest) in enumerate(self._buckets, start=1):
            for parameter, value in zip(parameters, largest.tolist(), strict=True):
                if not math.isfinite(value):
                    name: str = parameter.global_name  # type: ignore[attr-defined]
                    wrong.setdefault(name, (layer_of(name, indices), number, value))
        if not wrong:
            return None
        name, (layer, number, value) = max(wrong.items(), key=lambda entry: entry[1][0])
        more = f", and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        return layer, f"{rank} has {value} in the gradient of {name} (bucket {number} of {len(self._buckets)}{more})"
