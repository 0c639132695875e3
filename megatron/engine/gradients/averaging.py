"""Averaging of gradients over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_sum, reduce_scatter_sum


@dataclass(frozen=True)
class Averaging:
    """The mean over data-parallel ranks, with DeepSpeed's settings.

    Gradients are divided before ranks sum them, so that they do not overflow in fp16; `gradient_predivide_factor`
    splits the division.

    Attributes:
        axis: the ranks that sum.
        dtype: of the messages (`communication_data_type`).
        predivide_factor: the divisor before the sum; None for the whole divisor.
        copies: the whole divisor, if not the size of the axis: an expert's gradient on one rank comes from the tokens
            of several ranks.
        experts: the averaging of expert parameters, if different.
        is_expert: returns True for expert parameters.
    """

    axis: Axis
    dtype: torch.dtype
    predivide_factor: float | None = None
    copies: int | None = None
    experts: Averaging | None = None
    is_expert: Callable[[nn.Parameter], bool] = lambda _: False

    def of(self, parameter: nn.Parameter) -> Averaging:
        return self.experts if self.experts is not None and self.is_expert(parameter) else self

    def average(self, gradients: torch.Tensor) -> torch.Tensor:
        """Returns the mean over ranks, in the dtype of the messages; may overwrite the gradients; collective.

        Shapes: `[n]`, also the result.
        """
        if self._is_alone:
            return gradients
        return self._received(all_reduce_sum(self._to_send(gradients), self.axis))

    def average_local_part(self, gradients: torch.Tensor) -> None:
        """Averages this rank's part of the gradients in place; the other parts become undefined; collective.

        Shapes: `[n]` with `n` a multiple of the number of ranks.
        """
        if not self._is_alone:
            part = self._received(reduce_scatter_sum(self._to_send(gradients), self.axis))
            if part.dtype != gradients.dtype:
                gradients.narrow(0, self.axis.rank * len(part), len(part)).copy_(part)

    @property
    def _is_alone(self) -> bool:
        return self.axis.size == self._count == 1

    @property
    def _count(self) -> int:
        return self.axis.size if self.copies is None else self.copies

    def _to_send(self, gradients: torch.Tensor) -> torch.Tensor:
        divisor = self._count if self.predivide_factor is None else self.predivide_factor
        return gradients.to(self.dtype).div_(divisor)

    def _received(self, gradients: torch.Tensor) -> torch.Tensor:
        return gradients if self.predivide_factor is None else gradients.mul_(self.predivide_factor / self._count)
