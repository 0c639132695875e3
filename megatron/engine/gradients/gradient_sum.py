"""Accumulation of a step's gradients: the interface, and the base of accumulators in flat buffers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import nn

from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.bucket_queue import BucketQueue
from megatron.engine.buckets.flat_bucket import FlatBucket, FlatGroup
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_sum
from megatron.parallel.shard_spec import shard_spec_of
from megatron.parallel.tensor.weight_gradients import AddProduct

Tied = Sequence[tuple[nn.Parameter, Axis]]
BucketHook = Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor]], None]
Partial = Sequence[tuple[Axis, Sequence[nn.Parameter]]]


class GradientSum(ABC):
    """Accumulates the gradients of a step over its backward passes, in fp32 or `grad_accum_dtype`.

    A backward pass leaves `.grad`; `add` moves it to the sum. After the last one, `reduce` sums over ranks, and `parts`
    has the gradients of the update. `clear` starts the next step.

    Args:
        averaging: the averaging over data-parallel ranks.

    Attributes:
        sends_each_pass: the gradients of each backward pass are sent; otherwise their sums, once a step.
        divided_over: the ranks that hold different parts of the sum after `reduce`; None if each has all of it.
        before_add: called with parameters whose gradients of a backward pass are complete, before `add` takes them.
        before_reduce: called with the parameters of a bucket and this rank's gradients, before they are summed over
            ranks.
    """

    divided_over: Axis | None = None
    sends_each_pass = False
    before_add: Callable[[Iterable[nn.Parameter]], None] | None = None
    before_reduce: BucketHook | None = None
    _queue: BucketQueue
    _members: Sequence[Sequence[nn.Parameter]]  # of the buckets

    def __init__(self, averaging: Averaging) -> None:
        self._averaging = averaging
        self._is_reducing = False  # `before_reduce` has been called for all buckets
        self._summed: dict[tuple[int, ...], FlatBucket] = {}  # by the ids of parameters

    @abstractmethod
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Adds the gradients of these parameters, if they have one, and frees them."""

    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Announces parameters whose gradients are complete for this step, in `.grad` or added; optional.

        Starts the messages of buckets that are complete, in the same order on all ranks.
        """
        self._queue.complete(parameters)

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        """A function that adds weight gradients to the sum by their matrix product, instead of `.grad` and `add`.

        None if this is not supported for matrices of a dtype, or if `before_add` is set.
        """
        return None

    def begin(self, passes: int) -> None:  # noqa: B027  (most treat one pass like several)
        """Announces the number of backward passes of a step, before its first `add`."""

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:  # noqa: B027  (most keep all of them whole)
        """Announces the parameters of later calls of `of` and `sum_over`, before the first `add`."""

    @abstractmethod
    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The local sum of a parameter, in its shape, zero by default; may be changed in place until `reduce`."""

    def run_before_reduce(self) -> None:
        """Calls `before_reduce` for all buckets that have not been sent; before the first `sum_over`."""
        if self.before_reduce is not None:
            for members in self._unsent:
                self._call_before_reduce(members)
        self._is_reducing = True

    @property
    def _unsent(self) -> Sequence[Sequence[nn.Parameter]]:
        """The parameters of the buckets whose messages have not been started."""
        return [members for number, members in enumerate(self._members) if not self._queue.has_started(number)]

    def _call_before_reduce(self, members: Sequence[nn.Parameter]) -> None:
        if self.before_reduce is not None and not self._is_reducing:
            self.before_reduce(members, [self.of(parameter) for parameter in members])

    @torch.no_grad()
    def sum_over(self, axis: Axis, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the gradients of some parameters over an axis, in one message; before `reduce`; collective."""
        members = list(parameters)
        sums = [self.of(parameter) for parameter in members]
        key = tuple(map(id, members))
        if key not in self._summed:
            self._summed[key] = FlatBucket(sums)
        bucket = self._summed[key]
        all_reduce_sum(bucket.fill(sums), axis)
        torch._foreach_copy_(sums, bucket.views)
        bucket.close()

    @torch.no_grad()
    def reduce(self, tied: Tied = ()) -> None:
        """Averages all gradients over data-parallel ranks, then sums tied weights over their stages; collective."""
        # Only in this order do the copies of a tied weight get the same bits: both stages add the same two numbers,
        # while an average over more than two ranks depends on the gradient's offset in the stage's messages.
        self._average()
        self._is_reducing = False
        for parameter, axis in tied:
            part = self._part_of(parameter)
            total = all_reduce_sum(part.to(parameter.device), axis)  # offloaded gradients are in host memory
            if total is not part:
                part.copy_(total)

    @abstractmethod
    def _average(self) -> None:
        """Averages over data-parallel ranks, after the last `add`."""

    @abstractmethod
    def _part_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """This rank's part of the average of a tied weight; the same elements on all stages that hold it."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[torch.Tensor]:
        """The gradients of this rank's update, one flat tensor per group; empty if they are in `.grad`."""

    @property
    def unflattened(self) -> Sequence[Sequence[torch.Tensor]]:
        """The gradient of each parameter of each group, if the update uses these instead of `parts`; else empty."""
        return ()

    @property
    @abstractmethod
    def counted(self) -> Sequence[torch.Tensor]:
        """The gradients that this rank counts in the norm."""

    @abstractmethod
    def by_parameter(self) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        """The counted gradients by parameter, without vocabulary padding."""

    @abstractmethod
    def clear(self) -> None:
        """Resets the sum for the next step."""

    @property
    @abstractmethod
    def buffers(self) -> Sequence[torch.Tensor]:
        """All memory of the sum."""


def sum_in_backward(partial: Partial) -> None:
    """Sums partial gradients in every backward pass, one message for each, before DeepSpeed's hooks accumulate them."""
    for axis, parameters in partial:
        for parameter in parameters:
            parameter.register_hook(_summing_over(axis))


def _summing_over(axis: Axis) -> Callable[[torch.Tensor], torch.Tensor]:
    def sum_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return all_reduce_sum(gradient.clone(memory_format=torch.contiguous_format), axis)

    return sum_gradient


class FlatGradients(GradientSum):
    """Accumulation in flat tensors; each data-parallel rank updates with its part.

    Args:
        parts: this rank's part of each group, of equal length on all ranks.
        groups: the layout of the whole groups; a tied weight is a separate group, divided alike on its stages.
        is_counted: returns True if this rank counts a parameter in the gradient norm.
        averaging: the averaging over data-parallel ranks.
        order: see `BucketQueue`; by group by default.

    Shapes: parts `[n]`.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        groups: Sequence[FlatGroup],
        is_counted: Callable[[nn.Parameter], bool],
        averaging: Averaging,
        order: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(averaging)
        self._groups = groups
        parameters = (parameter for group in groups for parameter in group.parameters)
        self._order = order or {id(parameter): number for number, parameter in enumerate(parameters)}
        self.divided_over = averaging.axis if averaging.axis.size > 1 or averaging.experts is not None else None
        self._averagings = [averaging.of(group.parameters[0]) for group in groups]
        self._members = [group.parameters for group in groups]
        self._parts = list(parts)
        self._part_of_first = {id(group.parameters[0]): part for group, part in zip(groups, parts, strict=True)}
        self._counted: list[torch.Tensor] = []
        self._by_parameter: list[tuple[nn.Parameter, torch.Tensor]] = []
        for part, group, group_averaging in zip(parts, groups, self._averagings, strict=True):
            offset = group_averaging.axis.rank * len(part)  # of the part in the group
            ranges = group.counted(is_counted, offset, offset + len(part))
            self._counted += [part[first - offset : end - offset] for first, end in ranges]
            for parameter, start in zip(group.parameters, group.starts, strict=True):
                end = start + shard_spec_of(parameter).box_numel if is_counted(parameter) else start
                first, end = max(start - offset, 0), min(end - offset, len(part))
                if first < end:
                    self._by_parameter.append((parameter, part[first:end]))

    def _part_of(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._part_of_first[id(parameter)]

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        return self._parts

    @property
    def counted(self) -> Sequence[torch.Tensor]:
        return self._counted

    def by_parameter(self) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        return self._by_parameter
