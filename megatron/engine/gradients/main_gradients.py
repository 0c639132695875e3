"""The sum of the micro-batches' gradients, in flat fp32 buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn


class MainGradients:
    """Flat fp32 buffers in which the gradients of a rank's parameters add up, one micro-batch after the other.

    A micro-batch takes a fixed number of calls, however many parameters there are; torch copies the gradients of the
    first in one launch, and adds those of later ones, in bf16 to fp32, in one each.

    Args:
        buffers: one for each group of parameters; what follows the last parameter is padding and not counted.
        groups: the parameters, each group in the order in which they lie in its buffer.
        is_counted: whether this rank counts a parameter in the gradient norm.

    Attributes:
        parameters: of all groups.
        views: the part of a buffer that belongs to each parameter, in the parameter's shape.
        counted: the parts that this rank counts; adjacent ones are joined.

    Shapes: buffers `[n]` float32.
    """

    def __init__(
        self,
        buffers: Sequence[torch.Tensor],
        groups: Sequence[Sequence[nn.Parameter]],
        is_counted: Callable[[nn.Parameter], bool],
    ) -> None:
        self._buffers = list(buffers)
        self.parameters = [parameter for group in groups for parameter in group]
        self._is_empty = True
        self.views: list[torch.Tensor] = []
        self.counted: list[torch.Tensor] = []
        for buffer, group in zip(buffers, groups, strict=True):
            first = end = 0  # of the counted parameters that have not been joined to `counted`
            for parameter in group:
                start, size = end, parameter.numel()
                self.views.append(buffer.narrow(0, start, size).view_as(parameter))
                end = start + size
                if not is_counted(parameter):
                    self._count(buffer, first, start)
                    first = end
            self._count(buffer, first, end)

    def _count(self, buffer: torch.Tensor, first: int, end: int) -> None:
        if end > first:
            self.counted.append(buffer[first:end])

    @torch.no_grad()
    def take(self) -> None:
        """Adds the gradients of a micro-batch; a parameter without one has contributed nothing."""
        pairs = [(view, parameter.grad) for view, parameter in zip(self.views, self.parameters, strict=True)]
        views = [view for view, gradient in pairs if gradient is not None]
        gradients = [gradient for _, gradient in pairs if gradient is not None]
        if not self._is_empty:
            if views:
                torch._foreach_add_(views, gradients)
            return
        if views:
            torch._foreach_copy_(views, gradients)
        if len(views) < len(pairs):
            torch._foreach_zero_([view for view, gradient in pairs if gradient is None])
        self._is_empty = False

    def complete(self) -> None:
        """Says that the update begins: if nothing was taken, the gradients are zero."""
        if self._is_empty:
            torch._foreach_zero_(self._buffers)
            self._is_empty = False

    def clear(self) -> None:
        """Says that the next micro-batch begins a new sum."""
        self._is_empty = True

    def release(self) -> None:
        """Frees the gradients of the last micro-batch."""
        for parameter in self.parameters:
            parameter.grad = None
