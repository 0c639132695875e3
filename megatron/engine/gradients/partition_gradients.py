"""The part of the gradients that a rank updates with, and no more, for ZeRO 2."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron.engine.gradients.averaging import Averaging
from megatron.engine.gradients.gradient_sum import FlatGradients, FlatGroup


class _Run(NamedTuple):
    """Parameters that lie side by side in a group: which group, they, and the first element of them there."""

    group: int
    parameters: tuple[nn.Parameter, ...]
    first: int


class PartitionGradients(FlatGradients):
    """This rank's part of each group, to which every backward pass adds what ranks have averaged.

    A pass is sent in buckets: parameters that lie side by side are copied into one tensor in the network's dtype, their
    gradients are freed, ranks average the tensor, and each adds its own part of it. So between two passes a rank holds
    its part only, and during one the gradients of that pass and a bucket.

    A bucket is sent if any of its parameters has a gradient, so all ranks must compute the gradients of the same ones.

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
        self._bucket_elements = bucket_elements
        self._places = {
            id(parameter): (number, start, parameter)
            for number, group in enumerate(groups)
            for parameter, start in zip(group.parameters, group.starts, strict=True)
        }
        self._whole: dict[int, torch.Tensor | None] = {}  # by the parameter's id
        self._missing: dict[int, set[int]] = {}  # of the bucket of a parameter, those that have no gradient yet
        self._sent: set[int] = set()  # in this pass, before it was over

    def keep_whole(self, parameters: Iterable[nn.Parameter]) -> None:
        """Keeps the sums of parameters whole until `reduce`, so that `of` has them; before the first `add`."""
        self._whole.update(dict.fromkeys(map(id, parameters)))

    @torch.no_grad()
    def add(self, parameters: Iterable[nn.Parameter]) -> None:
        """Averages the gradients of a backward pass and adds this rank's part; collective over data-parallel ranks."""
        remaining = []
        for parameter in parameters:
            if id(parameter) in self._missing:
                self._missing[id(parameter)].add(id(parameter))
            if id(parameter) in self._whole:
                if parameter.grad is not None:
                    self.of(parameter).add_(parameter.grad)
                    parameter.grad = None
            elif id(parameter) in self._sent:
                self._sent.remove(id(parameter))
            else:
                remaining.append(parameter)
        for run in self._runs(remaining):
            self._send_gradients(run)

    def add_during_backward(self) -> None:
        """Sends a bucket as soon as a backward pass has all of its gradients, so that a rank never has all of a pass;
        after `keep_whole`. All ranks must compute gradients in the same order.
        """
        parameters = [place[2] for key, place in self._places.items() if key not in self._whole]
        for run in self._runs(parameters):
            missing = set(map(id, run.parameters))
            for parameter in run.parameters:
                self._missing[id(parameter)] = missing
                parameter.register_post_accumulate_grad_hook(functools.partial(self._arrived, run))

    @torch.no_grad()
    def _arrived(self, run: _Run, parameter: torch.Tensor) -> None:
        missing = self._missing[id(parameter)]
        missing.discard(id(parameter))
        if not missing:
            self._sent.update(map(id, run.parameters))
            self._send_gradients(run)

    def of(self, parameter: nn.Parameter) -> torch.Tensor:
        """The whole sum of a parameter that `keep_whole` was called with.

        Raises:
            ValueError: it was not.
        """
        if id(parameter) not in self._whole:
            raise ValueError(
                f"the gradient of a parameter of shape {list(parameter.shape)} is divided among ranks as soon as it is "
                "added; call keep_whole for it before the first step"
            )
        whole = self._whole[id(parameter)]
        if whole is None:
            whole = torch.zeros_like(parameter, dtype=self._parts[0].dtype)
            self._whole[id(parameter)] = whole
        return whole

    def _average(self) -> None:
        for run in self._runs([self._places[key][2] for key in self._whole]):
            self._send(run, [self.of(parameter) for parameter in run.parameters])
        self._whole = dict.fromkeys(self._whole)

    def _runs(self, parameters: Sequence[nn.Parameter]) -> Iterator[_Run]:
        """The parameters in the order of the groups, in buckets of neighbours."""
        run: list[nn.Parameter] = []
        group, first, end = -1, 0, 0
        for number, start, parameter in sorted(
            (self._places[id(each)] for each in parameters), key=lambda place: place[:2]
        ):
            size = parameter.numel()
            if run and (number != group or start != end or end + size - first > self._bucket_elements):
                yield _Run(group, tuple(run), first)
                run = []
            if not run:
                group, first = number, start
            run.append(parameter)
            end = start + size
        if run:
            yield _Run(group, tuple(run), first)

    def _send_gradients(self, run: _Run) -> None:
        """Frees the gradients of a pass once they are in one tensor; without any, nothing is sent."""
        if all(each.grad is None for each in run.parameters):
            return
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in run.parameters]
        for each in run.parameters:
            each.grad = None
        self._send(run, gradients)

    def _send(self, run: _Run, gradients: list[torch.Tensor]) -> None:
        """Averages gradients over the ranks and adds this rank's part of them."""
        flat = torch._utils._flatten_dense_tensors(gradients)
        gradients.clear()
        averaging, part = self._averagings[run.group], self._parts[run.group]
        flat = averaging.average(flat)
        offset = run.first - averaging.axis.rank * len(part)  # of the run in the part
        first, end = max(offset, 0), min(offset + len(flat), len(part))
        if first < end:
            part[first:end].add_(flat[first - offset : end - offset].to(part.device))

    def clear(self) -> None:
        """Sets them to zero."""
        torch._foreach_zero_(self._parts)

    @property
    def buffers(self) -> Sequence[torch.Tensor]:
        """The parts, and the sums that are kept whole."""
        return [*self._parts, *(whole for whole in self._whole.values() if whole is not None)]
