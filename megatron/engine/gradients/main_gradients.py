"""Accumulation of gradients in flat buffers of all of a rank's parameters, for ZeRO 1."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.bucket_queue import MOST_IN_FLIGHT, BucketQueue, Finish
from megatron.engine.buckets.flat_bucket import FlatGroup
from megatron.engine.gradients.gradient_sum import FlatGradients
from megatron.kernels import multi_tensor
from megatron.kernels.choice import Implementation
from megatron.kernels.products import add_product_, can_add_product
from megatron.parallel.tensor.weight_gradients import AddProduct


class MainGradients(FlatGradients):
    """Accumulation in flat buffers of all of a rank's parameters.

    A pass takes a fixed number of calls for any number of parameters, and one kernel launch; torch's addition of half
    precision to fp32 launches one for each parameter.

    If a step has a single backward pass, its gradients can stay where it leaves them: copying them to fp32, and
    measuring and reading them there, costs 10 more bytes of memory traffic per parameter.

    Args:
        buffers: one for each group, with zero padding.
        groups: the layout of the buffers.
        is_counted: returns True if this rank counts a parameter in the gradient norm.
        averaging: the averaging over data-parallel ranks; afterwards each has only its part of a buffer.
        implementation: of the addition, for buffers in fp32.
        order, overlaps: see `BucketQueue`; a group is a bucket.
        takes_unflattened: the optimizer can update with the gradients of single parameters, in their own dtype; only
            if this rank averages gradients with no other rank.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        groups: Sequence[FlatGroup],
        is_counted: Callable[[nn.Parameter], bool],
        averaging: Averaging,
        implementation: Implementation = Implementation.TORCH,
        order: Mapping[int, int] | None = None,
        *,
        takes_unflattened: bool = False,
        overlaps: bool = True,
    ) -> None:
        parts = []
        for buffer, group in zip(buffers, groups, strict=True):
            axis = averaging.of(group.parameters[0]).axis
            size = group.length // axis.size
            parts.append(buffer.narrow(0, axis.rank * size, size))
        super().__init__(parts, groups, is_counted, averaging, order)
        is_in_place = averaging.exchanged_dtype is None and averaging.dtype is buffers[0].dtype
        in_flight = None if is_in_place else MOST_IN_FLIGHT
        self._queue = BucketQueue(self._members, self._order, self._start, in_flight, overlaps=overlaps)
        is_wide = all(buffer.dtype is torch.float32 for buffer in buffers)
        self._implementation = implementation if is_wide else Implementation.TORCH
        self._buffers = list(buffers)
        self._views: dict[int, torch.Tensor] = {}  # by the parameter's id
        self._written: set[int] = set()
        self._is_counted = is_counted
        self._takes_unflattened = takes_unflattened and all(group.is_dense for group in groups)
        self._has_single_pass = False  # the gradients of this step stay where its single backward pass leaves them
        self._unflattened: dict[int, torch.Tensor] = {}  # those gradients, by the parameter's id
        for buffer, group in zip(buffers, groups, strict=True):
            for parameter, start in zip(group.parameters, group.starts, strict=True):
                self._views[id(parameter)] = buffer.narrow(0, start, parameter.numel()).view_as(parameter)

    def begin(self, passes: int) -> None:
        self._has_single_pass = self._takes_unflattened and passes == 1 and self.before_add is None

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        self._takes_unflattened = False  # their sums are changed in the buffers
        self._queue.hold(parameters)

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the gradients of a backward pass, and frees them."""
        if self.before_add is not None:
            parameters = list(parameters)
            self.before_add(parameters)
        ready = [parameter for parameter in parameters if parameter.grad is not None]
        if self._has_single_pass:
            self._unflattened.update(
                (id(parameter), gradient) for parameter, gradient in zip(ready, _gradients_of(ready), strict=True)
            )
            for parameter in ready:
                parameter.grad = None
            return
        later = [parameter for parameter in ready if id(parameter) in self._written] if self._written else []
        first = [parameter for parameter in ready if id(parameter) not in self._written] if later else ready
        if first:
            torch._foreach_copy_(self._views_of(first), _gradients_of(first))
            self._written.update(map(id, first))
        multi_tensor.add_(self._views_of(later), _gradients_of(later), implementation=self._implementation)
        for parameter in ready:
            parameter.grad = None

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        takes = self.before_add is None and all(can_add_product(buffer, dtype) for buffer in self._buffers)
        return self._add_product if takes else None

    def _add_product(self, parameter: nn.Parameter, a: torch.Tensor, b: torch.Tensor) -> bool:
        if self._has_single_pass:
            return False
        add_product_(self._views[id(parameter)], a, b, replaces=id(parameter) not in self._written)
        self._written.add(id(parameter))
        return True

    def _views_of(self, parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
        return [self._views[id(parameter)] for parameter in parameters]

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        self._copy_to_buffers()
        view = self._views[id(parameter)]
        if id(parameter) not in self._written:
            self._written.add(id(parameter))
            view.zero_()
        return view

    def _average(self) -> None:
        if self.divided_over is not None:
            self._queue.finish()
        elif not self._has_single_pass:
            self._zero_missing()

    @torch.no_grad()
    def _start(self, number: int) -> Finish:
        members, buffer = self._members[number], self._buffers[number]
        self.add(members)
        self._call_before_reduce(members)
        for parameter in members:
            self.of(parameter)  # zero if it has no gradient
        pending = self._averagings[number].start_local_part(buffer)

        def finish() -> None:
            part = pending.wait()
            if part.data_ptr() != self._parts[number].data_ptr():  # not in place
                self._parts[number].copy_(part)

        return finish

    def _zero_missing(self) -> None:
        if not self._written:
            torch._foreach_zero_(self._buffers)
        elif missing := [view for key, view in self._views.items() if key not in self._written]:
            torch._foreach_zero_(missing)
        self._written.update(self._views)

    @torch.no_grad()
    def _copy_to_buffers(self) -> None:
        """Copies the gradients of a single backward pass to the buffers."""
        if self._has_single_pass:
            self._has_single_pass = False
            if self._unflattened:
                torch._foreach_copy_([self._views[key] for key in self._unflattened], list(self._unflattened.values()))
            self._written.update(self._unflattened)
            self._unflattened.clear()
            self._zero_missing()

    @property
    def unflattened(self) -> Sequence[Sequence[torch.Tensor]]:
        """The gradients of a single backward pass; zeros if it left none."""
        if not self._has_single_pass:
            return ()
        return [
            [
                torch.zeros_like(each) if id(each) not in self._unflattened else self._unflattened[id(each)]
                for each in group.parameters
            ]
            for group in self._groups
        ]

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        self._copy_to_buffers()
        return super().parts

    @property
    def counted(self) -> Sequence[torch.Tensor]:
        """The counted elements of the parts, or the gradients of a single backward pass."""
        if not self._has_single_pass:
            return super().counted
        parameters = (each for group in self._groups for each in group.parameters if id(each) in self._unflattened)
        return [self._unflattened[id(each)] for each in parameters if self._is_counted(each)]

    def by_parameter(self) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        self._copy_to_buffers()
        self._takes_unflattened = False  # this needs the buffers in every step
        return super().by_parameter()

    def clear(self) -> None:
        self._written.clear()  # the first gradient of each parameter will overwrite its view
        self._queue.reset()
        self._unflattened.clear()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return [*self._buffers, *self._unflattened.values()]


def _gradients_of(parameters: Sequence[nn.Parameter]) -> list[torch.Tensor]:
    return [parameter.grad.contiguous() for parameter in parameters if parameter.grad is not None]
