"""Accumulation of this rank's part of the gradients only, for ZeRO 2."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron.engine.gradients.averaging import Averaging
from megatron.engine.gradients.flat_bucket import FlatBucket
from megatron.engine.gradients.gradient_sum import FlatGradients, FlatGroup
from megatron.kernels import multi_tensor


class _Bucket(NamedTuple):
    """Adjacent parameters of a group, their offset in the group, and their send buffer."""

    group: int
    parameters: tuple[nn.Parameter, ...]
    first: int
    flat: FlatBucket


class _WholeSums(NamedTuple):
    """Sums that are kept whole until `reduce`, all with the same averaging, in the dtype of the sums.

    Attributes:
        ranges: the ranges of the sums that this rank updates.
        targets: the corresponding ranges of its parts.
    """

    averaging: Averaging
    sums: FlatBucket
    ranges: list[torch.Tensor]
    targets: list[torch.Tensor]


class PartitionGradients(FlatGradients):
    """This rank's part of each group; every backward pass adds gradients that are already averaged over ranks.

    Gradients are sent in buckets: adjacent ones are copied into one tensor in the network's dtype and freed, ranks
    average the tensor, and each adds its part. Between passes a rank holds only its part, during a pass also the
    gradients of that pass and a bucket.

    Missing gradients are not sent, so all ranks must compute gradients of the same parameters.

    Args:
        parts: one for each group, initially zero.
        groups: the layout of the groups.
        is_counted: returns True if this rank counts a parameter in the gradient norm.
        averaging: the averaging over data-parallel ranks.
        bucket_elements: maximum size of a bucket (`reduce_bucket_size`), unless one parameter is larger.
    """

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        groups: Sequence[FlatGroup],
        is_counted: Callable[[nn.Parameter], bool],
        averaging: Averaging,
        bucket_elements: int,
    ) -> None:
        super().__init__(parts, groups, is_counted, averaging)
        self._bucket_elements, self._members = bucket_elements, ()
        self._locations = {
            id(parameter): (number, start, parameter)
            for number, group in enumerate(groups)
            for parameter, start in zip(group.parameters, group.starts, strict=True)
        }
        self._kept: dict[int, torch.Tensor | None] = {}  # the whole sums, by the parameter's id
        self._whole: list[_WholeSums] = []
        self._buckets: dict[tuple[int, ...], list[_Bucket]] = {}  # by the ids of parameters
        # By the id of a parameter, the ids in its bucket that have no gradient yet.
        self._missing: dict[int, set[int]] = {}

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        self._kept.update(dict.fromkeys(map(id, parameters)))
        self._members = [[self._locations[key][2] for key in self._kept]]

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages the gradients of a backward pass and adds this rank's part; collective over data-parallel ranks."""
        remaining, sums, gradients = [], [], []
        for parameter in parameters:
            if id(parameter) in self._missing:
                self._missing[id(parameter)].add(id(parameter))
            if parameter.grad is None:  # sent during the pass, or deferred
                continue
            if id(parameter) in self._kept:
                sums.append(self.of(parameter))
                gradients.append(parameter.grad)
                parameter.grad = None
            else:
                remaining.append(parameter)
        multi_tensor.add_(sums, gradients)
        for bucket in self._buckets_of(remaining):
            self._send(bucket)

    def add_during_backward(self) -> None:
        """Sends each bucket as soon as its gradients are complete, so that a rank never holds all gradients of a pass.

        Must be called after `keep_whole`. All ranks must compute gradients in the same order.
        """
        parameters = [location[2] for key, location in self._locations.items() if key not in self._kept]
        for bucket in self._buckets_of(parameters):
            missing = set(map(id, bucket.parameters))
            for parameter in bucket.parameters:
                self._missing[id(parameter)] = missing
                parameter.register_post_accumulate_grad_hook(functools.partial(self._on_gradient, bucket))

    @torch.no_grad()
    def _on_gradient(self, bucket: _Bucket, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # deferred: torch calls the hook all the same
            return
        missing = self._missing[id(parameter)]
        missing.discard(id(parameter))
        if not missing:
            self._send(bucket)

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole local sum of a parameter.

        Raises:
            ValueError: `keep_whole` was not called for it.
        """
        if id(parameter) not in self._kept:
            raise ValueError(
                f"the gradient of a parameter of shape {list(parameter.shape)} is divided among ranks as soon as it is "
                "added; call keep_whole for it before the first step"
            )
        self._whole = self._whole or self._whole_sums()
        for whole in self._whole:
            if not whole.sums.is_open:
                whole.sums.open().zero_()
        return self._kept[id(parameter)]  # type: ignore[return-value]

    def _whole_sums(self) -> list[_WholeSums]:
        groups: dict[int, list[nn.Parameter]] = {}
        for key in self._kept:
            number, _, parameter = self._locations[key]
            groups.setdefault(id(self._averagings[number]), []).append(parameter)
        wholes = []
        for parameters in groups.values():
            bucket = FlatBucket(parameters, self._parts[0].dtype)
            bucket.open().zero_()  # only allocated memory can be sliced
            ranges, targets = [], []
            averaging = dataclasses.replace(self._averaging.of(parameters[0]), dtype=bucket.flat.dtype)
            for parameter, view in zip(parameters, bucket.views, strict=True):
                self._kept[id(parameter)] = view
                number, start, _ = self._locations[id(parameter)]
                part = self._parts[number]
                offset = start - averaging.axis.rank * len(part)  # of the parameter in the part
                first, end = max(offset, 0), min(offset + parameter.numel(), len(part))
                if first < end:
                    ranges.append(view.view(-1)[first - offset : end - offset])
                    targets.append(part[first:end])
            wholes.append(_WholeSums(averaging, bucket, ranges, targets))
        return wholes

    def _average(self) -> None:
        for whole in self._whole:
            if whole.sums.is_open:
                average = whole.averaging.average(whole.sums.flat)
                if average is not whole.sums.flat:
                    whole.sums.flat.copy_(average)
                _add(whole.targets, whole.ranges)
                whole.sums.close()

    def _buckets_of(self, parameters: Sequence[nn.Parameter]) -> list[_Bucket]:
        """Divides parameters into buckets of adjacent ones."""
        key = tuple(map(id, parameters))
        if key not in self._buckets:
            self._buckets[key] = list(self._divided(parameters))
        return self._buckets[key]

    def _divided(self, parameters: Sequence[nn.Parameter]) -> Iterator[_Bucket]:
        members: list[nn.Parameter] = []
        group, first, end = -1, 0, 0
        locations = (self._locations[id(each)] for each in parameters)
        for number, start, parameter in sorted(locations, key=lambda location: location[:2]):
            size = parameter.numel()
            if members and (number != group or start != end or end + size - first > self._bucket_elements):
                yield _Bucket(group, tuple(members), first, FlatBucket(members))
                members = []
            if not members:
                group, first = number, start
            members.append(parameter)
            end = start + size
        if members:
            yield _Bucket(group, tuple(members), first, FlatBucket(members))

    def _send(self, bucket: _Bucket) -> None:
        """Averages a bucket over the ranks and adds this rank's part."""
        if self.before_add is not None:
            self.before_add(bucket.parameters)
        flat = bucket.flat.fill([each.grad for each in bucket.parameters])  # type: ignore[misc]
        if self.before_reduce is not None:
            self.before_reduce(bucket.parameters, bucket.flat.views)
        for each in bucket.parameters:
            each.grad = None
        averaging, part = self._averagings[bucket.group], self._parts[bucket.group]
        flat = averaging.average(flat)
        offset = bucket.first - averaging.axis.rank * len(part)  # of the bucket in the part
        first, end = max(offset, 0), min(offset + len(flat), len(part))
        if first < end:
            _add([part[first:end]], [flat[first - offset : end - offset]])
        bucket.flat.close()

    def clear(self) -> None:
        torch._foreach_zero_(self._parts)

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return [*self._parts, *(whole.sums.flat for whole in self._whole if whole.sums.is_open)]


def _add(parts: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Adds values to parts, which are in host memory if the optimizer is offloaded."""
    multi_tensor.add_(parts, [value.to(part.device) for part, value in zip(parts, values, strict=True)])
