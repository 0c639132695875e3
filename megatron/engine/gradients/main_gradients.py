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

    The gradients of a step's only backward pass can stay where they are: copied to fp32, measured and read there, they
    cost 10 bytes of memory traffic a parameter more.

    Args:
        buffers: one for each group, whose padding is zero.
        groups: where the parameters lie in them.
        is_counted: whether this rank counts a parameter in the gradient norm.
        averaging: how data-parallel ranks average; each then holds its part of a buffer only.
        implementation: of the addition, for buffers in fp32.
        takes_unflattened: whether the optimizer can update with the gradients of single parameters, in their own dtype;
            for a rank that averages with no other.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        groups: Sequence[FlatGroup],
        is_counted: Callable[[nn.Parameter], bool],
        averaging: Averaging,
        implementation: Implementation = Implementation.TORCH,
        *,
        takes_unflattened: bool = False,
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
        self._groups, self._is_counted = groups, is_counted
        self._takes_unflattened = takes_unflattened and all(group.is_dense for group in groups)
        self._is_only = False  # whether this step's gradients stay where its only backward pass leaves them
        self._only: dict[int, torch.Tensor] = {}  # by the parameter's id
        for buffer, group in zip(buffers, groups, strict=True):
            for parameter, start in zip(group.parameters, group.starts, strict=True):
                self._views[id(parameter)] = buffer.narrow(0, start, parameter.numel()).view_as(parameter)

    def begin(self, passes: int) -> None:
        self._is_only = self._takes_unflattened and passes == 1 and self.watcher is None

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        """Has all gradients copied to the buffers: these are changed there."""
        self._takes_unflattened = False

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes the gradients of a backward pass; a parameter without one has contributed nothing."""
        if self.watcher is not None:
            parameters = list(parameters)
            self.watcher(parameters)
        given = [parameter for parameter in parameters if parameter.grad is not None]
        if self._is_only:
            self._only.update(
                (id(parameter), gradient) for parameter, gradient in zip(given, _gradients_of(given), strict=True)
            )
            for parameter in given:
                parameter.grad = None
            return
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
        if self._is_only:
            return False
        add_product_(self._views[id(parameter)], a, b, replaces=id(parameter) not in self._written)
        self._written.add(id(parameter))
        return True

    def _views_of(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        return [self._views[id(parameter)] for parameter in parameters]

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        self._copy_only()
        view = self._views[id(parameter)]
        if id(parameter) not in self._written:
            self._written.add(id(parameter))
            view.zero_()
        return view

    def _average(self) -> None:
        if self._is_only:
            return
        self._zero_missing()
        for buffer, averaging in zip(self._buffers, self._averagings, strict=True):
            averaging.average_local_part(buffer)

    def _zero_missing(self) -> None:
        if not self._written:
            torch._foreach_zero_(self._buffers)
        elif missing := [view for key, view in self._views.items() if key not in self._written]:
            torch._foreach_zero_(missing)
        self._written.update(self._views)

    @torch.no_grad()
    def _copy_only(self) -> None:
        """Copies gradients that stayed where they were to the buffers, for one who reads these."""
        if self._is_only:
            self._is_only = False
            if self._only:
                torch._foreach_copy_([self._views[key] for key in self._only], list(self._only.values()))
            self._written.update(self._only)
            self._only.clear()
            self._zero_missing()

    @property
    def unflattened(self) -> Sequence[Sequence[torch.Tensor]]:
        """The gradients of a step's only backward pass, zero where it left none."""
        if not self._is_only:
            return ()
        return [
            [
                torch.zeros_like(each) if id(each) not in self._only else self._only[id(each)]
                for each in group.parameters
            ]
            for group in self._groups
        ]

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        self._copy_only()
        return super().parts

    @property
    def counted(self) -> Sequence[torch.Tensor]:
        """The counted elements of its parts, or of the gradients of a step's only backward pass."""
        if not self._is_only:
            return super().counted
        parameters = (each for group in self._groups for each in group.parameters if id(each) in self._only)
        return [self._only[id(each)] for each in parameters if self._is_counted(each)]

    def by_parameter(self) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        """The counted elements of each parameter, in the buffers, to which all gradients are copied from now on."""
        self._copy_only()
        self._takes_unflattened = False
        return super().by_parameter()

    def clear(self) -> None:
        """The first gradient of each parameter will replace what is there."""
        self._written.clear()
        self._only.clear()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return [*self._buffers, *self._only.values()]


def _gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad.contiguous() for parameter in parameters if parameter.grad is not None]
