"""Averaging of gradients over data-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import PendingMessage, start_all_reduce_sum, start_exchange, start_reduce_scatter_sum


@dataclass(frozen=True)
class Averaging:
    """The mean over data-parallel ranks, with DeepSpeed's settings.

    Gradients in half precision are divided before ranks sum them, so that they do not overflow in fp16;
    `gradient_predivide_factor` splits the division.

    Attributes:
        axis: the ranks that sum.
        dtype: of the messages (`communication_data_type`).
        exchanged_dtype: of the messages that give each rank its part, if ranks exchange parts and sum what they receive
            in float32; None if the network sums, in `dtype`.
        predivide_factor: the divisor before the sum; None for the whole divisor.
        copies: the whole divisor, if not the size of the axis: an expert's gradient on one rank comes from the tokens
            of several ranks.
        experts: the averaging of expert parameters, if different.
        is_expert: returns True for expert parameters.
    """

    axis: Axis
    dtype: torch.dtype
    predivide_factor: float | None = None
    exchanged_dtype: torch.dtype | None = None
    copies: int | None = None
    experts: Averaging | None = None
    is_expert: Callable[[nn.Parameter], bool] = lambda _: False

    def of(self, parameter: nn.Parameter) -> Averaging:
        return self.experts if self.experts is not None and self.is_expert(parameter) else self

    def average(self, gradients: torch.Tensor) -> torch.Tensor:
        """Returns the mean over ranks, in the dtype of the messages; may overwrite the gradients; collective.

        Shapes: `[n]`, also the result.
        """
        return self.start(gradients).wait()

    def start(self, gradients: torch.Tensor) -> PendingAverage:
        """Starts `average`; the gradients must not be used before it is over."""
        if self._is_alone:
            return PendingAverage(PendingMessage(gradients, None, self.axis))
        divisor = self._count if self.predivide_factor is None else self.predivide_factor
        sent = gradients.to(self.dtype).div_(divisor)
        return PendingAverage(start_all_reduce_sum(sent, self.axis), self._count / divisor)

    def start_local_part(self, gradients: torch.Tensor) -> PendingAverage:
        """Starts the mean of this rank's part of the gradients, which become undefined; collective.

        Shapes: `[n]` with `n` a multiple of the number of ranks `r`; the result `[n/r]`.
        """
        if self._is_alone:
            return PendingAverage(PendingMessage(gradients, None, self.axis))
        if self.exchanged_dtype is not None:
            received = start_exchange(gradients.to(self.exchanged_dtype), self.axis)
            return PendingAverage(received, self._count, self.axis.size)
        # float32 cannot overflow, so only the part is divided, which saves a pass over all gradients.
        first = 1.0 if self.dtype is torch.float32 else float(self._count)
        divisor = first if self.predivide_factor is None else self.predivide_factor
        sent = gradients.to(self.dtype)
        if divisor != 1.0:
            sent.div_(divisor)
        return PendingAverage(start_reduce_scatter_sum(sent, self.axis), self._count / divisor)

    @property
    def _is_alone(self) -> bool:
        return self.axis.size == self._count == 1

    @property
    def _count(self) -> int:
        return self.axis.size if self.copies is None else self.copies


class PendingAverage(NamedTuple):
    """An average in transit.

    Attributes:
        message: the sum of what ranks have already divided.
        divisor: the divisor of the sum.
        parts: the number of parts that the message consists of, whose sum is still to be computed.
    """

    message: PendingMessage
    divisor: float = 1.0
    parts: int = 1

    def wait(self) -> torch.Tensor:
        """Waits for the message and returns the average."""
        total = self.message.wait()
        if self.parts > 1:
            total = total.view(self.parts, -1).sum(0, dtype=torch.float32)
        return total if self.divisor == 1.0 else total.div_(self.divisor)
