"""Accumulation of gradients in `.grad`, for ZeRO 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import nn

from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.bucket_queue import BucketQueue, Finish, in_buckets
from megatron.engine.buckets.flat_bucket import FlatBucket
from megatron.engine.gradients.gradient_sum import GradientSum
from megatron.kernels.products import add_product_, can_add_product
from megatron.parallel.shard_spec import shard_spec_of
from megatron.parallel.tensor.weight_gradients import AddProduct


class DirectGradients(GradientSum):
    """Accumulation in `.grad` by autograd, for a network in fp32 whose weights are updated in place.

    If `before_add` is set, it needs the gradients of each pass, so they are accumulated here, with twice the memory.

    Args:
        parameters: all trained parameters, in the order of the network.
        is_counted: returns True if this rank counts a parameter in the gradient norm.
        bucket_elements: size of the buckets that are averaged in one message each.
        is_partial: returns True for parameters of `sum_over`, which are in separate buckets.
        overlaps: see `BucketQueue`.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        is_counted: Callable[[nn.Parameter], bool],
        averaging: Averaging,
        bucket_elements: int,
        is_partial: Callable[[nn.Parameter], bool] = lambda _: False,
        *,
        overlaps: bool = True,
    ) -> None:
        super().__init__(averaging)
        self._parameters = list(parameters)
        self._accumulated: dict[int, torch.Tensor] = {}  # by the parameter's id
        kinds: dict[tuple[int, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            kinds.setdefault((id(averaging.of(parameter)), is_partial(parameter)), []).append(parameter)
        self._members = [bucket for members in kinds.values() for bucket in in_buckets(members, bucket_elements)]
        self._flat = [FlatBucket(members) for members in self._members]
        order = {id(parameter): number for number, parameter in enumerate(parameters)}
        self._queue = BucketQueue(self._members, order, self._start, overlaps=overlaps)
        self._counted = [parameter for parameter in parameters if is_counted(parameter)]
        if averaging.experts is not None:  # ranks hold different experts: the first rank with a copy counts it
            self.divided_over = averaging.axis
            self._counted = [each for each in self._counted if averaging.of(each).axis.rank == 0]

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Does nothing unless `before_add` is set: autograd accumulates."""
        if self.before_add is None:
            return
        bucket_of, has_started = self._queue.bucket_of, self._queue.has_started
        ready = [each for each in parameters if each.grad is not None and not has_started(bucket_of[id(each)])]
        self.before_add(ready)
        for parameter in ready:
            if id(parameter) in self._accumulated:
                self._accumulated[id(parameter)].add_(parameter.grad)  # type: ignore[arg-type]
            else:
                self._accumulated[id(parameter)] = parameter.grad  # type: ignore[assignment]
            parameter.grad = None

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        self._queue.hold(parameters)

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        # Takes effect from the second micro-batch on: the gradient of the first becomes the sum.
        takes = self.before_add is None and all(can_add_product(parameter, dtype) for parameter in self._parameters)
        return _add_to_gradient if takes else None

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        if id(parameter) in self._accumulated:
            parameter.grad = self._accumulated.pop(id(parameter))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    @torch.no_grad()
    def _start(self, number: int) -> Finish:
        members, bucket = self._members[number], self._flat[number]
        self.add(members)
        self._call_before_reduce(members)
        flat = bucket.fill([self.of(parameter) for parameter in members])
        for parameter, view in zip(members, bucket.views, strict=True):
            parameter.grad = view
        pending = self._averaging.of(members[0]).start(flat)

        def finish() -> None:
            average = pending.wait()
            if average is not flat:
                flat.copy_(average)

        return finish

    @torch.no_grad()
    def _average(self) -> None:
        if self._averaging.axis.size > 1 or self._averaging.experts is not None:
            self._queue.finish()
        else:
            for parameter in self._parameters:
                self.of(parameter)  # creates missing gradients as zeros, so that all parameters are updated

    def _part_of(self, parameter: nn.Parameter) -> torch.Tensor:
        return self.of(parameter)

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        return ()

    @property
    def counted(self) -> Sequence[torch.Tensor]:
        return [self.of(parameter) for parameter in self._counted]

    def by_parameter(self) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        return [(each, self.of(each).view(-1)[: shard_spec_of(each).box_numel]) for each in self._counted]

    def clear(self) -> None:
        for parameter in self._parameters:
            parameter.grad = None
        for bucket in self._flat:
            bucket.close()
        self._queue.reset()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def _add_to_gradient(parameter: nn.Parameter, a: torch.Tensor, b: torch.Tensor) -> bool:
    if parameter.grad is None:
        return False
    add_product_(parameter.grad, a, b)
    return True
