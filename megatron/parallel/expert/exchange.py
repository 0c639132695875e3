"""All-to-all exchange of rows that overlaps with computation.

One autograd function starts the message, another waits for it. In the backward pass their roles are swapped: the second
starts the message with the gradients, the first waits for it. Computation between the two in the forward pass has its
backward pass between them, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from megatron.parallel.mesh import Axis
from megatron.parallel.messages import wait_for


@dataclass
class RowExchange:
    """One exchange between the ranks of an axis; rows are sent in the order of destinations and arrive in the order of
    sources.

    Attributes:
        sent: number of rows sent to each rank; None if equal for all.
        received: number of rows received from each rank; None if equal for all.
    """

    axis: Axis
    sent: Sequence[int] | None = None
    received: Sequence[int] | None = None
    _work: dist.Work | None = field(default=None, init=False)
    _tensors: tuple[torch.Tensor, ...] = field(default=(), init=False)  # in transit: sent, arriving

    @property
    def is_idle(self) -> bool:
        """True if the axis has no other ranks."""
        return self.axis.size == 1

    def start(self, rows: torch.Tensor) -> torch.Tensor:
        """Starts to send rows; returns the argument for `arrived`. Shapes: `[m, ...]` to the same."""
        return rows if self.is_idle else _Start.apply(rows, self)  # type: ignore[no-any-return]

    def arrived(self, sent: torch.Tensor) -> torch.Tensor:
        """Waits for the rows of the other ranks. Shapes: `[m, ...]` to `[r, ...]`."""
        return sent if self.is_idle else _Arrived.apply(sent, self)  # type: ignore[no-any-return]

    def back(self) -> RowExchange:
        """The exchange in the opposite direction."""
        return RowExchange(self.axis, self.received, self.sent)

    def begin(self, rows: torch.Tensor, *, reverse: bool = False) -> torch.Tensor:
        """Starts to send rows, or gradients in the opposite direction; the result is complete after `finish`."""
        sent, received = (self.received, self.sent) if reverse else (self.sent, self.received)
        rows = rows.contiguous()
        arriving = torch.empty_like(rows) if received is None else rows.new_empty(sum(received), *rows.shape[1:])
        splits = None if received is None else list(received), None if sent is None else list(sent)
        self._work = dist.all_to_all_single(arriving, rows, *splits, group=self.axis.group, async_op=True)
        self._tensors = rows, arriving
        return arriving

    def finish(self) -> torch.Tensor:
        """Waits for the rows that `begin` returned; only this wait is timed."""
        if self._work is not None:
            wait_for([self._work], self.axis)
        arrived = self._tensors[-1]
        self._work, self._tensors = None, ()
        return arrived


def exchanged_counts(counts: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Exchanges row counts: from rows sent to each expert, to rows received from each rank for each local expert.

    Shapes: `[e]` int64 to `[p, e/p]`, by source, for p ranks.
    """
    received = torch.empty_like(counts)
    with axis.timed():
        dist.all_to_all_single(received, counts.contiguous(), group=axis.group)
    return received.view(axis.size, -1)


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, exchange):  # type: ignore[no-untyped-def]
        ctx.exchange = exchange
        exchange.begin(rows)
        return rows.view_as(rows)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.exchange.finish()
        return gradient, None


class _Arrived(torch.autograd.Function):
    @staticmethod
    def forward(ctx, sent, exchange):  # type: ignore[no-untyped-def]
        ctx.exchange = exchange
        return exchange.finish()

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return ctx.exchange.begin(gradient, reverse=True), None
