"""Flat tensors of many parameters, which are sent in one message."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn


class FlatBucket:
    """A buffer for contiguous copies of tensors, with permanent views; it has memory only while it is open.

    Args:
        like: tensors with the shapes and the device of the views.
        dtype: of the buffer; `like`'s by default.
        starts: the offset of each view; one after the other by default.
        length: elements of the buffer; up to the end of the last view by default.

    Attributes:
        flat: the buffer. `[n]`
        views: a view for each tensor, in its shape.
    """

    def __init__(
        self,
        like: Sequence[torch.Tensor],
        dtype: torch.dtype | None = None,
        starts: Sequence[int] | None = None,
        length: int | None = None,
    ) -> None:
        sizes = [each.numel() for each in like]
        starts = starts or list(itertools.accumulate(sizes, initial=0))[:-1]
        ends = [start + size for start, size in zip(starts, sizes, strict=True)]
        self.flat = torch.empty(length or ends[-1], dtype=dtype or like[0].dtype, device=like[0].device)
        self.views = [self.flat[start:end].view_as(each) for start, end, each in zip(starts, ends, like, strict=True)]
        gaps = zip([0, *ends], [*starts, len(self.flat)], strict=True)
        self._gaps = [self.flat[first:end] for first, end in gaps if first < end]
        self._bytes = self.flat.untyped_storage().nbytes()
        self.is_open = True
        self.close()

    def open(self) -> torch.Tensor:
        """Allocates the memory; the values are undefined."""
        if not self.is_open:
            self.flat.untyped_storage().resize_(self._bytes)
            self.is_open = True
        return self.flat

    def fill(self, tensors: Sequence[torch.Tensor | None]) -> torch.Tensor:
        """Allocates the memory and copies tensors into it; zero for None, and between the views."""
        self.open()
        pairs = [(view, each) for view, each in zip(self.views, tensors, strict=True) if each is not None]
        zeros = self._gaps + [view for view, each in zip(self.views, tensors, strict=True) if each is None]
        if zeros:
            torch._foreach_zero_(zeros)
        if pairs:
            torch._foreach_copy_([view for view, _ in pairs], [each for _, each in pairs])
        return self.flat

    def close(self) -> None:
        """Frees the memory; the views must not be used until it is opened again."""
        if self.is_open:
            self.flat.untyped_storage().resize_(0)
            self.is_open = False


class FlatGroup(NamedTuple):
    """Parameters in a flat buffer.

    Attributes:
        parameters: in the order of the buffer.
        starts: the offset of each parameter.
        length: elements of the buffer, padding included.
    """

    parameters: tuple[nn.Parameter, ...]
    starts: tuple[int, ...]
    length: int

    @classmethod
    def of(cls, parameters: Iterable[nn.Parameter], weights: torch.Tensor) -> FlatGroup:
        """The group of parameters whose weights are views into a flat tensor."""
        address, size = weights.data_ptr(), weights.element_size()
        placed = sorted(
            (((each.data_ptr() - address) // size, each) for each in parameters), key=lambda entry: entry[0]
        )
        return cls(tuple(each for _, each in placed), tuple(start for start, _ in placed), len(weights))

    @property
    def is_dense(self) -> bool:
        """True if all padding is at the end."""
        sizes = [parameter.numel() for parameter in self.parameters]
        return list(self.starts) == [sum(sizes[:number]) for number in range(len(sizes))]

    def counted(self, is_counted: Callable[[nn.Parameter], bool], first: int, end: int) -> Iterator[tuple[int, int]]:
        """The ranges of counted elements between two offsets of the buffer; adjacent ranges are joined."""
        range_start = range_end = first
        for parameter, start in zip(self.parameters, self.starts, strict=True):
            if not is_counted(parameter):
                continue
            if start != range_end and start > first:
                if range_end > range_start:
                    yield range_start, range_end
                range_start = min(max(start, first), end)
            range_end = min(max(start + parameter.numel(), first), end)
        if range_end > range_start:
            yield range_start, range_end
