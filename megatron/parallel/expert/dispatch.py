"""Token dispatch: sends tokens to their experts on any rank, and combines the results.

A rank sorts its rows by expert, which is the order of the ranks that hold the experts; ranks exchange the rows, and
each sorts the received rows by its own experts. In dropless mode, ranks first exchange the number of rows for each
expert, and the host reads these counts, once per layer and pass. If experts have a capacity, every rank sends the same
number of rows to each expert, filled or not, and the host reads nothing.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable

from megatron.parallel.expert.exchange import RowExchange, exchanged_counts
from megatron.parallel.expert.order import ExpertOrder, Slots
from megatron.parallel.mesh import Axis


@dataclass(frozen=True)
class Dispatch(ABC):
    """The dispatch of one micro-batch in one layer: `start`, then `arrived`, then `combined`.

    Attributes:
        order: this rank's (token, choice) pairs sorted by expert, over the experts of all ranks.
        exchange: the exchange of rows with the other ranks.
    """

    order: ExpertOrder
    exchange: RowExchange

    @staticmethod
    def of(experts: torch.Tensor, count: int, axis: Axis, slots: Slots | None = None) -> Dispatch:
        """The dispatch to the chosen experts; collective over the axis.

        Args:
            experts: the experts that each token chose, numbered over all ranks.
            count: number of experts in the layer.
            axis: the ranks that hold different experts, equally many each, in order.
            slots: the slots of the choices, if experts have a capacity, which is the same on all ranks.

        Shapes: experts `[n, k]` int64.
        """
        order = ExpertOrder.of(experts, count, slots)
        return CapacityDispatch(order, RowExchange(axis)) if slots is not None else DroplessDispatch.along(order, axis)

    def start(self, tokens: torch.Tensor) -> torch.Tensor:
        """Starts to send tokens to their experts. Shapes: `[n, h]` to `[rows, h]`."""
        return self.exchange.start(self.order.spread(tokens))

    def arrived(self, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Waits for the rows of this rank's experts, sent by `start`; also returns one past the last row of each, or
        None if all have the same number.

        Shapes: rows `[r, h]`; ends `[e/p]` int64 for p ranks.
        """
        rows = self.exchange.arrived(sent)
        return rows if self.exchange.is_idle else self._by_expert(rows), self._ends

    def combined(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sends the experts' outputs back, and sums each token's rows with its `kept_weights`.

        Shapes: rows as in `arrived`, weights `[n, k]`; result `[n, h]`.
        """
        back = self.exchange.back()
        rows = back.arrived(back.start(rows if self.exchange.is_idle else self._by_source(rows)))
        return self.order.combine(rows, weights)

    @property
    def _ends(self) -> torch.Tensor | None:
        return self.order.ends

    @abstractmethod
    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Reorders rows from (source, expert) to (expert, source)."""

    @abstractmethod
    def _by_source(self, rows: torch.Tensor) -> torch.Tensor:
        """The inverse of `_by_expert`."""


@dataclass(frozen=True)
class DroplessDispatch(Dispatch):
    """Every token reaches all of its experts.

    Attributes:
        sorting: the permutation of received rows to the order of experts; None if nothing is exchanged.
        ends: one past the last sorted row of each of this rank's experts; None if nothing is exchanged.
    """

    sorting: Permutation | None = None
    ends: torch.Tensor | None = None

    @classmethod
    def along(cls, order: ExpertOrder, axis: Axis) -> DroplessDispatch:
        """The dispatch for an order of rows; collective over the axis."""
        if axis.size == 1:
            return cls(order, RowExchange(axis))
        counts = exchanged_counts(order.counts, axis)  # [p, e/p]
        if counts.is_meta:  # without values: an even load
            sent = received = [order.positions.numel() // axis.size] * axis.size
        else:
            sent, received = torch.stack([order.counts.view_as(counts).sum(dim=1), counts.sum(dim=1)]).tolist()
        sorting = Permutation.by_expert(counts, sum(received))
        return cls(order, RowExchange(axis, sent, received), sorting, counts.sum(dim=0).cumsum(dim=0))

    @property
    def _ends(self) -> torch.Tensor | None:
        return self.order.ends if self.ends is None else self.ends

    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.sorting is None else self.sorting.apply(rows)

    def _by_source(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.sorting is None else self.sorting.inverse().apply(rows)


class CapacityDispatch(Dispatch):
    """Every rank sends the same number of rows to each expert."""

    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        ranks, experts = self.exchange.axis.size, len(self.order.counts)
        return rows.unflatten(0, (ranks, experts // ranks, -1)).transpose(0, 1).flatten(0, 2)

    def _by_source(self, rows: torch.Tensor) -> torch.Tensor:
        ranks, experts = self.exchange.axis.size, len(self.order.counts)
        return rows.unflatten(0, (experts // ranks, ranks, -1)).transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class Permutation:
    """A permutation of rows.

    Shapes: both `[r]` int64.

    Attributes:
        sources: the old index of every new row.
        targets: the new index of every old row.
    """

    sources: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def by_expert(cls, counts: torch.Tensor, total: int) -> Permutation:
        """The permutation from (source, expert) to (expert, source).

        Args:
            total: the sum of the counts.

        Shapes: counts `[p, e]`.
        """
        experts = torch.arange(counts.shape[1], device=counts.device).repeat(counts.shape[0])
        sources = experts.repeat_interleave(counts.flatten(), output_size=total).sort(stable=True).indices
        targets = torch.empty_like(sources)
        targets[sources] = torch.arange(total, device=counts.device)
        return cls(sources, targets)

    def inverse(self) -> Permutation:
        """The inverse permutation."""
        return Permutation(self.targets, self.sources)

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """Returns the rows in the new order. Shapes: `[r, h]` to the same."""
        return _Permuted.apply(rows, self)  # type: ignore[no-any-return]


class _Permuted(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, order):  # type: ignore[no-untyped-def]
        ctx.order = order
        return rows.index_select(0, order.sources)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return gradient.index_select(0, ctx.order.targets), None
