"""Tokens on their way to the experts that they chose, wherever these are, and back.

A rank sorts its rows by expert, so that they lie in the order of the ranks that hold the experts; ranks exchange the
rows, and each sorts what arrives by its own experts. If no token is dropped, ranks first tell each other how many rows
each expert gets, and the host reads these counts, once a layer and pass. If experts have a capacity, every rank sends
as many rows to each expert, filled or not, and the host reads nothing.
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
    """The way of one micro-batch's tokens to the experts of this rank and back: `start`, `arrived`, `combined`.

    Attributes:
        order: this rank's pairs of token and choice by expert, of all ranks' experts.
        exchange: how many rows go to each rank and come from each.
    """

    order: ExpertOrder
    exchange: RowExchange

    @staticmethod
    def of(experts: torch.Tensor, count: int, axis: Axis, slots: Slots | None = None) -> Dispatch:
        """The way for the chosen experts; collective over the axis.

        Args:
            experts: of all experts of the layer, those that each token chose.
            count: number of experts.
            axis: the ranks that hold different experts, equally many each, in order.
            slots: the places of the choices in experts with a capacity, the same on all ranks; None without one.

        Shapes: experts `[n, k]` int64.
        """
        order = ExpertOrder.of(experts, count, slots)
        return CapacityDispatch(order, RowExchange(axis)) if slots is not None else DroplessDispatch.along(order, axis)

    def start(self, tokens: torch.Tensor) -> torch.Tensor:
        """Begins to send tokens to their experts. Shapes: `[n, h]` to rows of h."""
        return self.exchange.start(self.order.spread(tokens))

    def arrived(self, sent: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Waits; takes the result of `start` to the rows for this rank's experts, and one past the last row of each,
        None if all have as many.

        Shapes: rows `[r, h]`; ends `[e/p]` int64 for p ranks.
        """
        rows = self.exchange.arrived(sent)
        return rows if self.exchange.is_idle else self._by_expert(rows), self._ends

    def combined(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sends what the experts computed back, and adds up each token's rows with its `kept_weights`.

        Shapes: rows as they arrived, weights `[n, k]` to `[n, h]`.
        """
        back = self.exchange.back()
        rows = back.arrived(back.start(rows if self.exchange.is_idle else self._by_source(rows)))
        return self.order.combine(rows, weights)

    @property
    def _ends(self) -> torch.Tensor | None:
        return self.order.ends

    @abstractmethod
    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        """Sorts rows that lie by source and expert by expert and source."""

    @abstractmethod
    def _by_source(self, rows: torch.Tensor) -> torch.Tensor:
        """The converse."""


@dataclass(frozen=True)
class DroplessDispatch(Dispatch):
    """Every token reaches all the experts that it chose.

    Attributes:
        places: where the rows that arrive lie once they are sorted; None where nothing is exchanged.
        ends: one past the last sorted row of each of this rank's experts; None as well.
    """

    places: Permutation | None = None
    ends: torch.Tensor | None = None

    @classmethod
    def along(cls, order: ExpertOrder, axis: Axis) -> DroplessDispatch:
        """The way for an order of rows; collective over the axis."""
        if axis.size == 1:
            return cls(order, RowExchange(axis))
        counts = exchanged_counts(order.counts, axis)  # [p, e/p]
        if counts.is_meta:  # without values: an even load
            sent = received = [order.positions.numel() // axis.size] * axis.size
        else:
            sent, received = torch.stack([order.counts.view_as(counts).sum(dim=1), counts.sum(dim=1)]).tolist()
        places = Permutation.by_expert(counts, sum(received))
        return cls(order, RowExchange(axis, sent, received), places, counts.sum(dim=0).cumsum(dim=0))

    @property
    def _ends(self) -> torch.Tensor | None:
        return self.order.ends if self.ends is None else self.ends

    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.places is None else self.places.apply(rows)

    def _by_source(self, rows: torch.Tensor) -> torch.Tensor:
        return rows if self.places is None else self.places.inverse().apply(rows)


class CapacityDispatch(Dispatch):
    """Every rank sends as many rows to each expert."""

    def _by_expert(self, rows: torch.Tensor) -> torch.Tensor:
        ranks, experts = self.exchange.axis.size, len(self.order.counts)
        return rows.unflatten(0, (ranks, experts // ranks, -1)).transpose(0, 1).flatten(0, 2)

    def _by_source(self, rows: torch.Tensor) -> torch.Tensor:
        ranks, experts = self.exchange.axis.size, len(self.order.counts)
        return rows.unflatten(0, (experts // ranks, ranks, -1)).transpose(0, 1).flatten(0, 2)


@dataclass(frozen=True)
class Permutation:
    """Another order of rows.

    Shapes: both `[r]` int64.

    Attributes:
        sources: the old row of every new one.
        targets: the new row of every old one.
    """

    sources: torch.Tensor
    targets: torch.Tensor

    @classmethod
    def by_expert(cls, counts: torch.Tensor, total: int) -> Permutation:
        """From rows by source and expert to rows by expert and source.

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
        """The order before."""
        return Permutation(self.targets, self.sources)

    def apply(self, rows: torch.Tensor) -> torch.Tensor:
        """The rows in the new order. Shapes: `[r, h]` to the same."""
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
