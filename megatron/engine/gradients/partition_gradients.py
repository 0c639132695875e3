"""The part of the gradients that a rank updates with, and no more, for ZeRO 2."""

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


class _Run(NamedTuple):
    """Parameters that lie side by side in a group: which group, they, the first element of them there, and where they
    are sent from.
    """

    group: int
    parameters: tuple[nn.Parameter, ...]
    first: int
    bucket: FlatBucket


class _Whole(NamedTuple):
    """Sums that are kept whole until they are averaged alike, in their own dtype: the sums, and which ranges of them
    this rank adds to which ranges of its parts.
    """

    averaging: Averaging
    sums: FlatBucket
    ranges: list[torch.Tensor]
    own: list[torch.Tensor]


class PartitionGradients(FlatGradients):
    """This rank's part of each group, to which every backward pass adds what ranks have averaged.

    A pass is sent in buckets: parameters that lie side by side are copied into one tensor in the network's dtype, their
    gradients are freed, ranks average the tensor, and each adds its own part of it. So between two passes a rank holds
    its part only, and during one the gradients of that pass and a bucket.

    Only gradients that are there are sent, so all ranks must compute those of the same parameters.

    Args:
        parts: one for each group, zero.
        groups: where the parameters lie in them.
        is_counted: whether this rank counts a parameter in the gradient norm.
        averaging: how data-parallel ranks average.
        bucket_elements: how many elements are sent at once (`reduce_bucket_size`), unless one parameter has more.
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
        self._places = {
            id(parameter): (number, start, parameter)
            for number, group in enumerate(groups)
            for parameter, start in zip(group.parameters, group.starts, strict=True)
        }
        self._kept: dict[int, torch.Tensor | None] = {}  # by the id of a parameter that is kept whole, its sum
        self._whole: list[_Whole] = []
        self._runs: dict[tuple[int, ...], list[_Run]] = {}  # by the ids of parameters
        self._missing: dict[int, set[int]] = {}  # of the bucket of a parameter, those that have no gradient yet

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keeps the sums of parameters whole until `reduce`, so that `of` has them; before the first `add`."""
        self._kept.update(dict.fromkeys(map(id, parameters)))
        self._members = [[self._places[key][2] for key in self._kept]]

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages the gradients of a backward pass and adds this rank's part; collective over data-parallel ranks."""
        remaining, sums, gradients = [], [], []
        for parameter in parameters:
            if id(parameter) in self._missing:
                self._missing[id(parameter)].add(id(parameter))
            if parameter.grad is None:  # sent during the pass, or put off
                continue
            if id(parameter) in self._kept:
                sums.append(self.of(parameter))
                gradients.append(parameter.grad)
                parameter.grad = None
            else:
                remaining.append(parameter)
        multi_tensor.add_(sums, gradients)
        for run in self._runs_of(remaining):
            self._send(run)

    def add_during_backward(self) -> None:
        """Sends a bucket as soon as a backward pass has all of its gradients, so that a rank never has all of a pass;
        after `keep_whole`. All ranks must compute gradients in the same order.
        """
        parameters = [place[2] for key, place in self._places.items() if key not in self._kept]
        for run in self._runs_of(parameters):
            missing = set(map(id, run.parameters))
            for parameter in run.parameters:
                self._missing[id(parameter)] = missing
                parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, run))

    @torch.no_grad()
    def _arrived(self, run: _Run, parameter: torch.Tensor) -> None:
        if parameter.grad is None:  # put off: torch calls the hook all the same
            return
        missing = self._missing[id(parameter)]
        missing.discard(id(parameter))
        if not missing:
            self._send(run)

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole sum of a parameter that `keep_whole` was called with.

        Raises:
            ValueError: it was not.
        """
        if id(parameter) not in self._kept:
            raise ValueError(
                f"the gradient of a parameter of shape {list(parameter.shape)} is divided among ranks as soon as it is "
                "added; call keep_whole for it before the first step"
            )
        self._whole = self._whole or self._kept_whole()
        for whole in self._whole:
            if not whole.sums.is_open:
                whole.sums.open().zero_()
        return self._kept[id(parameter)]  # type: ignore[return-value]

    def _kept_whole(self) -> list[_Whole]:
        groups: dict[int, list[nn.Parameter]] = {}
        for key in self._kept:
            number, _, parameter = self._places[key]
            groups.setdefault(id(self._averagings[number]), []).append(parameter)
        wholes = []
        for parameters in groups.values():
            bucket = FlatBucket(parameters, self._parts[0].dtype)
            bucket.open().zero_()  # views can be made of memory only
            ranges, own = [], []
            averaging = dataclasses.replace(self._averaging.of(parameters[0]), dtype=bucket.flat.dtype)
            for parameter, view in zip(parameters, bucket.views, strict=True):
                self._kept[id(parameter)] = view
                number, start, _ = self._places[id(parameter)]
                part = self._parts[number]
                offset = start - averaging.axis.rank * len(part)  # of the parameter in the part
                first, end = max(offset, 0), min(offset + parameter.numel(), len(part))
                if first < end:
                    ranges.append(view.view(-1)[first - offset : end - offset])
                    own.append(part[first:end])
            wholes.append(_Whole(averaging, bucket, ranges, own))
        return wholes

    def _average(self) -> None:
        for whole in self._whole:
            if whole.sums.is_open:
                average = whole.averaging.average(whole.sums.flat)
                if average is not whole.sums.flat:
                    whole.sums.flat.copy_(average)
                _add(whole.own, whole.ranges)
                whole.sums.close()

    def _runs_of(self, parameters: Sequence[nn.Parameter]) -> list[_Run]:
        """The parameters in the order of the groups, in buckets of neighbours."""
        key = tuple(map(id, parameters))
        if key not in self._runs:
            self._runs[key] = list(self._neighbours(parameters))
        return self._runs[key]

    def _neighbours(self, parameters: Sequence[nn.Parameter]) -> Iterator[_Run]:
        run: list[nn.Parameter] = []
        group, first, end = -1, 0, 0
        for number, start, parameter in sorted(
            (self._places[id(each)] for each in parameters), key=lambda place: place[:2]
        ):
            size = parameter.numel()
            if run and (number != group or start != end or end + size - first > self._bucket_elements):
                yield _Run(group, tuple(run), first, FlatBucket(run))
                run = []
            if not run:
                group, first = number, start
            run.append(parameter)
            end = start + size
        if run:
            yield _Run(group, tuple(run), first, FlatBucket(run))

    def _send(self, run: _Run) -> None:
        """Averages the gradients of a pass over the ranks and adds this rank's part of them."""
        if self.watcher is not None:
            self.watcher(run.parameters)
        flat = run.bucket.fill([each.grad for each in run.parameters])  # type: ignore[misc]
        if self.look is not None:
            self.look(run.parameters, run.bucket.views)
        for each in run.parameters:
            each.grad = None
        averaging, part = self._averagings[run.group], self._parts[run.group]
        flat = averaging.average(flat)
        offset = run.first - averaging.axis.rank * len(part)  # of the run in the part
        first, end = max(offset, 0), min(offset + len(flat), len(part))
        if first < end:
            _add([part[first:end]], [flat[first - offset : end - offset]])
        run.bucket.close()

    def clear(self) -> None:
        torch._foreach_zero_(self._parts)

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        return [*self._parts, *(whole.sums.flat for whole in self._whole if whole.sums.is_open)]


def _add(parts: list[torch.Tensor], values: list[torch.Tensor]) -> None:
    """Adds values to parts, which are in the memory of the host if the optimizer is offloaded."""
    multi_tensor.add_(parts, [value.to(part.device) for part, value in zip(parts, values, strict=True)])
