"""The sum of the gradients in flat buffers that hold all of them, for ZeRO 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from megatron.engine.gradients.averaging import Averaging
from megatron.engine.gradients.gradient_sum import FlatGradients, FlatGroup
from megatron.kernels import multi_tensor
from megatron.kernels.choice import Implementation
from megatron.kernels.products import add_product_, can_add_product
from megatron.parallel.tensor.weight_gradients import AddProduct


class MainGradients(FlatGradients):
    """Flat buffers in which the gradients of a rank's parameters add up, one backward pass after the other.

    A pass takes a fixed number of calls, however many parameters there are, and one launch; torch's addition of half
    precision to fp32 takes one for each parameter.

    Args:
        buffers: one for each group, whose padding is zero.
        groups: where the parameters lie in them.
        is_counted: whether this rank counts a parameter in the gradient norm.
        averaging: how data-parallel ranks average; each then holds its part of a buffer only.
        implementation: of the addition, for buffers in fp32.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        groups: Sequence[FlatGroup],
        is_counted: Callable[[nn.Parameter], bool],
        averaging: Averaging,
        implementation: Implementation = Implementation.TORCH,
    ) -> None:
        parts = []
        for buffer, group in zip(buffers, groups, strict=True):
            axis = averaging.of(group.parameters[0]).axis
            size = group.length // axis.size
            parts.append(buffer.narrow(0, axis.rank * size, size))
        super().__init__(parts, groups, is_counted, averaging)
        is_wide = all(buffer.dtype is torch.float32 for buffer in buffers)
        self._implementation = implementation if is_wide else Implementation.TORCH
        self._buffers = list(buffers)
        self._views: dict[int, torch.Tensor] = {}  # by the parameter's id
        self._written: set[int] = set()
        for buffer, group in zip(buffers, groups, strict=True):
            for parameter, start in zip(group.parameters, group.starts, strict=True):
                self._views[id(parameter)] = buffer.narrow(0, start, parameter.numel()).view_as(parameter)

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes the gradients of a backward pass; a parameter without one has contributed nothing."""
        if self.watcher is not None:
            parameters = list(parameters)
            self.watcher(parameters)
        given = [parameter for parameter in parameters if parameter.grad is not None]
        later = [parameter for parameter in given if id(parameter) in self._written] if self._written else []
        first = [parameter for parameter in given if id(parameter) not in self._written] if later else given
        if first:
            torch._foreach_copy_(self._views_of(first), _gradients_of(first))
            self._written.update(map(id, first))
        multi_tensor.add_(self._views_of(later), _gradients_of(later), implementation=self._implementation)
        for parameter in given:
            parameter.grad = None

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        """The first product of a step is written over what is there."""
        takes = self.watcher is None and all(can_add_product(buffer, dtype) for buffer in self._buffers)
        return self._add_product if takes else None

    def _add_product(self, parameter: nn.Parameter, a: torch.Tensor, b: torch.Tensor) -> bool:
        add_product_(self._views[id(parameter)], a, b, replaces=id(parameter) not in self._written)
        self._written.add(id(parameter))
        return True

    def _views_of(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        return [self._views[id(parameter)] for parameter in parameters]

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """Its view into a buffer."""
        view = self._views[id(parameter)]
        if id(parameter) not in self._written:
            self._written.add(id(parameter))
            view.zero_()
        return view

    def _average(self) -> None:
        if not self._written:
            torch._foreach_zero_(self._buffers)
        elif missing := [view for key, view in self._views.items() if key not in self._written]:
            torch._foreach_zero_(missing)
        self._written.update(self._views)
        for buffer, averaging in zip(self._buffers, self._averagings, strict=True):
            averaging.average_own_part(buffer)

    def clear(self) -> None:
        """The first gradient of each parameter will replace what is there."""
        self._written.clear()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """The flat buffers."""
        return self._buffers


def _gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad.contiguous() for parameter in parameters if parameter.grad is not None]
