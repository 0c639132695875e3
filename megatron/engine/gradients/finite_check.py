"""Looks for NaN and infinity in a rank's own loss and gradients, before ranks sum them and cannot say whose it was."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn

from megatron.engine.gradients.gradient_figures import layer_of
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_gather_json

_DESCRIBED = 3


class FiniteCheck:
    """The largest magnitudes in the loss and the gradients of one rank and step: NaN or infinite if any element is.

    They stay on the device until a step turns out to be bad, so that no good step waits for them.
    """

    def __init__(self) -> None:
        self._losses: list[torch.Tensor] = []  # of micro-batches
        self._buckets: list[tuple[Sequence[nn.Parameter], torch.Tensor]] = []

    @torch.no_grad()
    def look(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """Looks at the next bucket of gradients that is about to be summed over ranks."""
        if gradients:
            self._buckets.append((parameters, torch.stack(torch._foreach_norm(list(gradients), math.inf))))

    def is_wrong(self, losses: Sequence[torch.Tensor]) -> torch.Tensor:
        """Whether something that this rank has looked at, or one of its losses, is not finite; without waiting.

        Args:
            losses: sums over the tokens of its micro-batches. Each `[1]`.

        Shapes: result `[]` bool.
        """
        self._losses = [*losses]
        return torch.cat([*losses, *(largest for _, largest in self._buckets)]).isfinite().logical_not().any()

    def describe(self, layers: Sequence[str], mesh: ParallelMesh) -> str:
        """Which losses and gradients of which ranks are not finite, those that are nearest to the loss first, since
        from there a backward pass spreads them; collective over all ranks.

        Args:
            layers: global names of the layers of the whole network.
        """
        gathered = all_gather_json(self._own_entry(layers, mesh), mesh.control)
        entries = sorted(filter(None, gathered), key=lambda entry: -entry[0])  # type: ignore[no-any-return]
        if not entries:
            return "No rank saw NaN or infinity in its own loss or gradients before they were summed"
        left = len(entries) - _DESCRIBED
        more = f"; and {left} more ranks" if left > 0 else ""
        return f"Before ranks summed anything: {'; '.join(text for _, text in entries[:_DESCRIBED])}{more}"

    def _own_entry(self, layers: Sequence[str], mesh: ParallelMesh) -> tuple[int, str] | None:
        """How near to the loss this rank has something that is not finite, and what; None if it has nothing."""
        rank = f"rank {mesh.world.rank}" + (f" ({mesh.place})" if mesh.place else "")
        for number, loss in enumerate(self._losses, start=1):
            if not math.isfinite(loss):
                where = f" in micro-batch {number} of {len(self._losses)}" if len(self._losses) > 1 else ""
                return len(layers), f"{rank} has a loss of {float(loss)}{where}"
        places = {name: place for place, name in enumerate(layers)}
        wrong = [
            (layer_of(parameter.global_name, places), number, parameter.global_name, value)  # type: ignore[attr-defined]
            for number, (parameters, largest) in enumerate(self._buckets, start=1)
            for parameter, value in zip(parameters, largest.tolist(), strict=True)
            if not math.isfinite(value)
        ]
        if not wrong:
            return None
        place, number, name, value = max(wrong, key=lambda entry: entry[0])
        others = len({name for _, _, name, _ in wrong}) - 1
        more = f", and {others} more" if others else ""
        return place, f"{rank} has {value} in the gradient of {name} (bucket {number} of {len(self._buckets)}{more})"
