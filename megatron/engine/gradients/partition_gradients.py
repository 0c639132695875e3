"""Accumulation of this rank's part of the gradients only, for ZeRO 2."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import torch
from torch import nn

from megatron.engine.buckets.averaging import Averaging
from megatron.engine.buckets.bucket_queue import MOST_IN_FLIGHT, BucketQueue, Finish
from megatron.engine.buckets.flat_bucket import FlatBucket, FlatGroup
from megatron.engine.gradients.gradient_sum import FlatGradients
from megatron.kernels import multi_tensor


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

    Each group is sent as a bucket: its gradients are copied into one tensor in the network's dtype and freed, and each
    rank receives the average of its part, which it adds. Between passes a rank holds only its part, during a pass also
    the gradients of incomplete buckets, and the buckets in transit.

    A bucket without any gradient is not sent, so all ranks must compute gradients of the same buckets.

    Args:
        parts: one for each group, initially zero.
        groups: the layout of the groups.
        is_counted: returns True if this rank counts a parameter in the gradient norm.
        averaging: the averaging over data-parallel ranks.
        order, overlaps: see `BucketQueue`.
    """

    sends_each_pass = True

    def __init__(
        self,
        parts: Sequence[torch.Tensor],
        groups: Sequence[FlatGroup],
        is_counted: Callable[[nn.Parameter], bool],
        averaging: Averaging,
        order: Mapping[int, int] | None = None,
        *,
        overlaps: bool = True,
    ) -> None:
        super().__init__(parts, groups, is_counted, averaging, order)
        self._overlaps = overlaps
        self._locations = {
            id(parameter): (number, start, parameter)
            for number, group in enumerate(groups)
            for parameter, start in zip(group.parameters, group.starts, strict=True)
        }
        self._kept: dict[int, torch.Tensor | None] = {}  # the whole sums, by the parameter's id
        self._whole: list[_WholeSums] = []

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        self._kept.update(dict.fromkeys(map(id, parameters)))

    @property
    def _unsent(self) -> Sequence[Sequence[nn.Parameter]]:
        return [[self._locations[key][2] for key in self._kept]] if self._kept else ()

    @cached_property
    def _buckets(self) -> list[tuple[int, tuple[nn.Parameter, ...], FlatBucket]]:
        """The group, the parameters and the buffer of each bucket."""
        buckets = []
        for number, group in enumerate(self._groups):
            sent = [each for each in zip(group.parameters, group.starts, strict=True) if id(each[0]) not in self._kept]
            if sent:
                members, starts = zip(*sent, strict=True)
                buckets.append((number, members, FlatBucket(members, None, starts, group.length)))
        return buckets

    @cached_property
    def _queue(self) -> BucketQueue:  # type: ignore[override]
        members = [parameters for _, parameters, _ in self._buckets]
        return BucketQueue(members, self._order, self._start, MOST_IN_FLIGHT, overlaps=self._overlaps)

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Sends the gradients of a backward pass that are not sent yet; collective over data-parallel ranks."""
        sums, gradients, unsent = [], [], set()
        for parameter in parameters:
            if parameter.grad is None:  # sent during the pass, or deferred
                continue
            if id(parameter) in self._kept:
                sums.append(self.of(parameter))
                gradients.append(parameter.grad)
                parameter.grad = None
            else:
                unsent.add(self._queue.bucket_of[id(parameter)])
        multi_tensor.add_(sums, gradients)
        self._queue.reset()  # also sends a gradient that was completed after its bucket
        self._queue.start_all(unsent)
        self._queue.reset()

    @torch.no_grad()
    def complete(self, parameters: Iterable[nn.Parameter]) -> None:
        """Announces complete gradients of a backward pass; ignores parameters whose gradients are deferred."""
        self._queue.complete(each for each in parameters if each.grad is not None and id(each) not in self._kept)

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
        self._queue.wait()
        for whole in self._whole:
            if whole.sums.is_open:
                average = whole.averaging.average(whole.sums.flat)
                if average is not whole.sums.flat:
                    whole.sums.flat.copy_(average)
                _add(whole.targets, whole.ranges)
                whole.sums.close()

    @torch.no_grad()
    def _start(self, index: int) -> Finish:
        """Starts to average a bucket; this rank's part is added when it arrives."""
        number, members, bucket = self._buckets[index]
        if self.before_add is not None:
            self.before_add([parameter for parameter in members if parameter.grad is not None])
        flat = bucket.fill([parameter.grad for parameter in members])
        if self.before_reduce is not None:
            self.before_reduce(members, bucket.views)
        for parameter in members:
            parameter.grad = None
        pending = self._averagings[number].start_local_part(flat)

        def finish() -> None:
            _add([self._parts[number]], [pending.wait()])
            bucket.close()

        return finish

    def clear(self) -> None:
        torch._foreach_zero_(self._parts)

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return [*self._parts, *(whole.sums.flat for whole in self._whole if whole.sums.is_open)]


def _add(parts: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Adds values to parts, which are in host memory if the optimizer is offloaded."""
    multi_tensor.add_(parts, [value.to(part.device) for part, value in zip(parts, values, strict=True)])
