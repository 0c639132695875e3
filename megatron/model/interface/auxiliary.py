"""Auxiliary losses that layers add to the objective, such as the load-balancing loss of a mixture of experts.

A layer attaches its loss to the hidden states that it returns: forward leaves them unchanged, and backward passes the
loss its gradient. An auxiliary loss thus works in any pipeline stage and with activation recomputation, and is never
sent between stages.
"""

from __future__ import annotations

import torch


class AuxiliaryLosses:
    """The losses of this rank's layers for one micro-batch.

    Args:
        backward_scale: the engine's factor of a micro-batch's loss before backward: the fp16 loss scale divided by the
            number of micro-batches. `[]` if it is a tensor.
    """

    def __init__(self, backward_scale: float | torch.Tensor = 1.0) -> None:
        self.backward_scale = backward_scale
        self._values: dict[tuple[str, int], torch.Tensor] = {}

    def attach(self, hidden: torch.Tensor, name: str, layer: int, loss: torch.Tensor) -> torch.Tensor:
        """Returns `hidden` with a loss attached, and records its value.

        The step minimizes the main loss plus the mean of `loss` over the micro-batches. A recomputed layer records the
        same value again, which has no effect.

        Shapes: loss `[]`.
        """
        self.record(name, layer, loss)
        return _Attach.apply(hidden, loss, self.backward_scale)

    def record(self, name: str, layer: int, value: torch.Tensor) -> None:
        """Records a value that is not part of the objective, such as a statistic.

        The step sums it over micro-batches and ranks if the objective lists it as a metric.
        """
        self._values[name, layer] = value.detach()

    def sums(self) -> dict[str, torch.Tensor]:
        """The losses and recorded values by name, each summed over this rank's layers, without gradients."""
        totals: dict[str, torch.Tensor] = {}
        for (name, _), value in self._values.items():
            totals[name] = totals[name] + value if name in totals else value
        return totals


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, loss, scale):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(loss)
        ctx.scale = scale
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss).mul_(ctx.scale), None
