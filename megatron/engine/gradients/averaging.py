"""How gradients are averaged over the ranks that computed them on different samples."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_sum, reduce_scatter_sum


@dataclass(frozen=True)
class Averaging:
    """The mean over data-parallel ranks, as DeepSpeed's settings ask for it.

    Sums are divided before ranks add them, so that they do not overflow in fp16, unless `gradient_predivide_factor`
    divides the work between before and after.

    Attributes:
        axis: the ranks.
        dtype: in which gradients are sent (`communication_data_type`).
        predivide_factor: what they are divided by before they are sent; None for the number of ranks.
        copies: over how many ranks the mean is taken, if not those of the axis: each of them may have the gradients of
            the tokens of several ranks.
        experts: how parameters of experts are averaged, if not like the others.
        is_expert: which parameters these are.
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
        """The mean over ranks, in the dtype in which it was sent; overwrites the gradients, or not; collective.

        Shapes: `[n]`, also the result.
        """
        if self._is_alone:
            return gradients
        return self._received(all_reduce_sum(self._to_send(gradients), self.axis))

    def average_local_part(self, gradients: torch.Tensor) -> None:
        """Averages in place what falls to this rank if the ranks divide the gradients; collective.

        The rest is not defined afterwards.

        Shapes: `[n]` with `n` a multiple of the ranks.
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
