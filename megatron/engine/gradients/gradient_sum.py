"""The sum of the gradients of a step: what every way to hold it offers, and the one that leaves it where autograd has
it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron.engine.gradients.averaging import Averaging
from megatron.engine.gradients.flat_bucket import FlatBucket
from megatron.kernels.products import add_product_, can_add_product
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_sum
from megatron.parallel.shard_spec import shard_spec_of
from megatron.parallel.tensor.weight_gradients import AddProduct

Tied = Sequence[tuple[nn.Parameter, Axis]]
Look = Callable[[Sequence[nn.Parameter], Sequence[torch.Tensor]], None]
Partial = Sequence[tuple[Axis, Sequence[nn.Parameter]]]
# What is averaged at once where gradients do not lie in one buffer, in elements.
_BUCKET_ELEMENTS = 500_000_000


class FlatGroup(NamedTuple):
    """Parameters that lie in one flat buffer, in their order there, each with its first element; and the buffer's
    elements, padding included.
    """

    parameters: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], weights: torch.Tensor) -> FlatGroup:
        """The group of parameters whose weights are views into a flat tensor."""
        begin, size = weights.data_ptr(), weights.element_size()
        placed = sorted((((each.data_ptr() - begin) // size, each) for each in parameters), key=lambda place: place[0])
        return cls(tuple(each for _, each in placed), tuple(start for start, _ in placed), len(weights))

    @property
    def is_dense(self) -> bool:
        """True if no parameter begins behind a gap: padding is at the end."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return list(self.starts) == [sum(sizes[:number]) for number in range(len(sizes))]

    def counted(self, is_counted: Callable[[nn.Parameter], bool], first: int, end: int) -> Iterator[tuple[int, int]]:
        """The ranges of counted elements between two elements of the buffer; adjacent ones are joined."""
        begin = until = first
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            if not is_counted(parameter):
                continue
            if start != until and start > first:
                if until > begin:
                    yield begin, until
                begin = min(max(start, first), end)
            until = min(max(start + parameter.numel(), first), end)
        if until > begin:
            yield begin, until


class GradientSum(ABC):
    """The gradients of a step, added up over its backward passes in fp32 (or what `grad_accum_dtype` says).

    A backward pass leaves `.grad`; `add` takes it. Once all are over, `reduce` sums over ranks, and what is to be
    updated is in `parts`. `clear` begins the next step.

    Args:
        averaging: how data-parallel ranks average.

    Attributes:
        divided_over: the ranks that hold different parts of the sum after `reduce`; None if each has all of it.
        watcher: called with parameters whose gradients of a backward pass are complete, before they are taken.
        look: called with the parameters of a bucket and this rank's gradients, before they are summed over ranks.
    """

    divided_over: Axis | None = None
    watcher: Callable[[Iterable[nn.Parameter]], None] | None = None
    look: Look | None = None
    _members: Sequence[Sequence[nn.Parameter]] = ()  # of the buckets that are not summed before `reduce`

    def __init__(self, averaging: Averaging) -> None:
        self._averaging = averaging
        self._summed: dict[tuple[int, ...], FlatBucket] = {}  # by the ids of parameters

    @abstractmethod
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Takes the gradients of these parameters, where they have one, and frees them."""

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        """Adds products that are gradients of trained parameters during a backward pass, in place of `.grad` and `add`;
        None if this sum takes no products of matrices of a dtype, or if gradients are watched.
        """
        return None

    def begin(self, passes: int) -> None:  # noqa: B027  (most add up one pass like several)
        """Announces, before a step's first `add`, the number of its backward passes."""

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:  # noqa: B027  (most keep all of them whole)
        """Announces, before the first `add`, the parameters that `of` and `reduce` will be asked for."""

    @abstractmethod
    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The sum for a parameter on this rank, in the parameter's shape, zero if there is none; it may be changed in
        place until `reduce`.
        """

    def show(self) -> None:
        """Has `look` see what no rank has sent yet; before the first `sum_over`."""
        if self.look is not None:
            for members in self._members:
                self.look(members, [self.of(parameter) for parameter in members])

    @torch.no_grad()
    def sum_over(self, axis: Axis, parameters: Iterable[nn.Parameter]) -> None:
        """Sums the sums of some parameters over the ranks of an axis, in one message; before `reduce`; collective."""
        chosen = list(parameters)
        sums = [self.of(parameter) for parameter in chosen]
        key = tuple(map(id, chosen))
        if key not in self._summed:
            self._summed[key] = FlatBucket(sums)
        bucket = self._summed[key]
        all_reduce_sum(bucket.fill(sums), axis)
        torch._foreach_copy_(sums, bucket.views)
        bucket.close()

    @torch.no_grad()
    def reduce(self, tied: Tied = ()) -> None:
        """Averages everything over data-parallel ranks, then sums tied weights over the ranks that hold them;
        collective.

        In this order the copies of a tied weight get the same bits: each of two ends adds the same two numbers, while
        an average over more than two ranks depends on where a gradient lies in the messages of an end.
        """
        self._average()
        for parameter, axis in tied:
            part = self._part_of(parameter)
            total = all_reduce_sum(part.to(parameter.device), axis)  # from the host, if it has the gradients
            if total is not part:
                part.copy_(total)

    @abstractmethod
    def _average(self) -> None:
        """Averages over data-parallel ranks; nothing is added afterwards."""

    @abstractmethod
    def _part_of(self, parameter: nn.Parameter) -> torch.Tensor:
        """What this rank has of the average of a tied weight; the same elements as the other ranks that hold it."""

    @property
    @abstractmethod
    def parts(self) -> Sequence[torch.Tensor]:
        """What this rank updates with, one flat tensor for each group; none if it is `.grad` of the parameters."""

    @property
    def unflattened(self) -> Sequence[Sequence[torch.Tensor]]:
        """The gradient of each parameter of each group, for an update in place of `parts`; none if that uses
        `parts`.
        """
        return ()

    @property
    @abstractmethod
    def counted(self) -> Sequence[torch.Tensor]:
        """What this rank counts in the gradient norm."""

    @abstractmethod
    def by_parameter(self) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        """The same by parameter, without the padding of the vocabulary."""

    @abstractmethod
    def clear(self) -> None:
        """Begins the sum of the next step."""

    @property
    @abstractmethod
    def buffers(self) -> Sequence[torch.Tensor]:
        """All that is held of the sum."""


def sum_in_backward(partial: Partial) -> None:
    """Has every backward pass sum these gradients, one message for each, before any DeepSpeed hook sees them: where
    DeepSpeed adds gradients up itself.
    """
    for axis, parameters in partial:
        for parameter in parameters:
            parameter.register_hook(_summing_over(axis))


def _summing_over(axis: Axis) -> Callable[[torch.Tensor], torch.Tensor]:
    def sum_gradient(gradient: torch.Tensor) -> torch.Tensor:
        return all_reduce_sum(gradient.clone(memory_format=torch.contiguous_format), axis)

    return sum_gradient


class GradientsInPlace(GradientSum):
    """Autograd's own sums, for a network in fp32 whose weights are updated in place.

    For a watcher, who is to see the gradients of a single pass, they are added up here, which takes their memory twice.

    Args:
        parameters: all that are trained.
        is_counted: whether this rank counts a parameter in the gradient norm.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], is_counted: Callable[[nn.Parameter], bool], averaging: Averaging
    ) -> None:
        super().__init__(averaging)
        self._parameters = list(parameters)
        self._members = [self._parameters]
        self._taken: dict[int, torch.Tensor] = {}  # by the parameter's id
        self._buckets: list[tuple[Averaging, list[nn.Parameter], FlatBucket]] = []
        self._counted = [parameter for parameter in parameters if is_counted(parameter)]
        if averaging.experts is not None:  # of which ranks hold different ones: the first that holds a copy counts it
            self.divided_over = averaging.axis
            self._counted = [each for each in self._counted if averaging.of(each).axis.rank == 0]

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Nothing, unless there is a watcher: autograd adds to what is there."""
        if self.watcher is None:
            return
        fresh = [parameter for parameter in parameters if parameter.grad is not None]
        self.watcher(fresh)
        for parameter in fresh:
            if id(parameter) in self._taken:
                self._taken[id(parameter)].add_(parameter.grad)  # type: ignore[arg-type]
            else:
                self._taken[id(parameter)] = parameter.grad  # type: ignore[assignment]
            parameter.grad = None

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        """From the second micro-batch on: the gradient of the first becomes the sum as it is."""
        takes = self.watcher is None and all(can_add_product(parameter, dtype) for parameter in self._parameters)
        return _add_to_gradient if takes else None

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        if id(parameter) in self._taken:
            parameter.grad = self._taken.pop(id(parameter))
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        return parameter.grad

    @torch.no_grad()
    def _average(self) -> None:
        for parameter in self._parameters:
            self.of(parameter)  # zero if it has none, so that every one is updated
        if self._averaging.axis.size == 1 and self._averaging.experts is None:
            return
        self._buckets = self._buckets or list(_in_buckets(self._parameters, self._averaging))
        for averaging, members, bucket in self._buckets:
            flat = bucket.fill([self.of(parameter) for parameter in members])
            for parameter, view in zip(members, bucket.views, strict=True):
                parameter.grad = view
            average = averaging.average(flat)
            if average is not flat:
                flat.copy_(average)

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
        for *_, bucket in self._buckets:
            bucket.close()

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return [parameter.grad for parameter in self._parameters if parameter.grad is not None]


def _add_to_gradient(parameter: nn.Parameter, a: torch.Tensor, b: torch.Tensor) -> bool:
    if parameter.grad is None:
        return False
    add_product_(parameter.grad, a, b)
    return True


def _in_buckets(
    parameters: Sequence[nn.Parameter], averaging: Averaging
) -> Iterator[tuple[Averaging, list[nn.Parameter], FlatBucket]]:
    """What is averaged in one message, with how and where."""
    groups: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        groups.setdefault(id(averaging.of(parameter)), []).append(parameter)
    for group in groups.values():
        first = 0
        while first < len(group):
            end, elements = first, 0
            while end < len(group) and (end == first or elements + group[end].numel() <= _BUCKET_ELEMENTS):
                end, elements = end + 1, elements + group[end].numel()
            members = group[first:end]
            yield averaging.of(members[0]), members, FlatBucket(members)
            first = end


class FlatGradients(GradientSum):
    """Sums in flat tensors, each data-parallel rank's part of which is what it updates with.

    Args:
        parts: this rank's part of each group, of equal length on all ranks.
        groups: where the parameters lie in the whole; a tied weight is a group of its own, which its other ranks divide
            alike.
        is_counted: whether this rank counts a parameter in the gradient norm.
        averaging: how data-parallel ranks average.

    Shapes: parts `[n]`.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        groups: Sequence[FlatGroup],
        is_counted: Callable[[nn.Parameter], bool],
        averaging: Averaging,
    ) -> None:
        super().__init__(averaging)
        self.divided_over = averaging.axis if averaging.axis.size > 1 or averaging.experts is not None else None
        self._averagings = [averaging.of(group.parameters[0]) for group in groups]
        self._members = [group.parameters for group in groups]
        self._parts = list(parts)
        self._alone = {id(group.parameters[0]): part for group, part in zip(groups, parts, strict=True)}
        self._counted: list[torch.Tensor] = []
        self._by_parameter: list[tuple[nn.Parameter, torch.Tensor]] = []
        for part, group, own in zip(parts, groups, self._averagings, strict=True):
            begin = own.axis.rank * len(part)
            ranges = group.counted(is_counted, begin, begin + len(part))
            self._counted += [part[first - begin : end - begin] for first, end in ranges]
            for parameter, start in zip(group.parameters, group.starts, strict=True):
                end = start + shard_spec_of(parameter).box_numel if is_counted(parameter) else start
                first, end = max(start - begin, 0), min(end - begin, len(part))
                if first < end:
                    self._by_parameter.append((parameter, part[first:end]))

    def _part_of(self, parameter: nn.Parameter) -> torch.Tensor:
        return self._alone[id(parameter)]

    @property
    def parts(self) -> Sequence[torch.Tensor]:
        return self._parts

    @property
    def counted(self) -> Sequence[torch.Tensor]:
        return self._counted

    def by_parameter(self) -> Sequence[tuple[nn.Parameter, torch.Tensor]]:
        return self._by_parameter
