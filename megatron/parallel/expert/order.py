"""The (token, choice) pairs of a rank sorted by expert, and the conversion of tokens to this order and back."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.autograd.function import once_differentiable


@dataclass(frozen=True)
class Slots:
    """The slot of each choice in its expert.

    Shapes: indices `[n, k]` int64.

    Attributes:
        indices: from 0; `capacity` for a dropped choice.
        capacity: number of slots of every expert.
    """

    indices: torch.Tensor
    capacity: int

    @property
    def kept(self) -> torch.Tensor:
        """True for choices that are not dropped. Shapes: `[n, k]` bool."""
        return self.indices < self.capacity


@dataclass(frozen=True)
class ExpertOrder:
    """The (token, choice) pairs sorted by expert, and within an expert by token or by slot.

    Shapes: tokens `[rows]` int64; positions `[n, k]` int64; counts and ends `[e]` int64; kept `[n, k]` bool. There are
        n*k rows, or with a capacity c of every expert e*c.

    Attributes:
        tokens: the token of every sorted row; arbitrary for an unfilled row.
        positions: the sorted row of every pair; arbitrary for a dropped pair.
        counts: number of tokens that chose each expert.
        ends: one past the last row of every expert; None if all have the same number.
        kept: True for pairs that are not dropped; None if none is dropped.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    counts: torch.Tensor
    ends: torch.Tensor | None
    kept: torch.Tensor | None = None

    @classmethod
    def of(cls, experts: torch.Tensor, count: int, slots: Slots | None = None) -> ExpertOrder:
        """The order for the chosen experts, without synchronizing. Shapes: experts `[n, k]`."""
        ordered, pairs = experts.flatten().sort(stable=True)
        ends = torch.searchsorted(ordered, torch.arange(count, device=pairs.device), right=True)
        counts = ends.diff(prepend=ends.new_zeros(1))
        if slots is not None:
            return cls._of_slots(experts, counts, slots)
        positions = torch.empty_like(pairs)
        positions[pairs] = torch.arange(pairs.numel(), device=pairs.device)
        return cls(pairs // experts.shape[1], positions.view(experts.shape), counts, ends)

    @classmethod
    def _of_slots(cls, experts: torch.Tensor, counts: torch.Tensor, slots: Slots) -> ExpertOrder:
        kept, rows = slots.kept, len(counts) * slots.capacity
        positions = experts * slots.capacity + slots.indices
        numbers = torch.arange(len(experts), device=experts.device).unsqueeze(1).expand_as(experts)
        tokens = experts.new_zeros(rows + 1)  # the last one receives all dropped pairs
        tokens[torch.where(kept, positions, rows)] = numbers
        return cls(tokens[:rows], torch.where(kept, positions, 0), counts, None, kept)

    def kept_weights(self, weights: torch.Tensor) -> torch.Tensor:
        """The weights, zero where a token is dropped. Shapes: `[n, k]` to the same."""
        return weights if self.kept is None else weights * self.kept

    @property
    def choices(self) -> tuple[torch.Tensor, ...]:
        """The sorted rows of the tokens' first choices, of their second choices, and so on. Shapes: `[n]` each."""
        return self.positions.unbind(dim=1)

    def spread(self, tokens: torch.Tensor) -> torch.Tensor:
        """Copies every token to the rows of its experts. Shapes: `[n, h]` to `[rows, h]`."""
        return _Spread.apply(tokens, self)  # type: ignore[no-any-return]

    def combine(self, rows: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sums each token's rows, weighted by `kept_weights`, in float32.

        Shapes: `[rows, h]` and `[n, k]` to `[n, h]`.
        """
        return _Combine.apply(rows, weights, self)  # type: ignore[no-any-return]


class _Spread(torch.autograd.Function):
    """Its backward pass adds in a fixed order, while indexing's own would add atomically."""

    @staticmethod
    def forward(ctx, tokens, order):  # type: ignore[no-untyped-def]
        ctx.order = order
        return tokens.index_select(0, order.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        order = ctx.order
        first, *others = order.choices
        if order.kept is None:
            total = gradient.index_select(0, first).float()
            for rows in others:
                total += gradient.index_select(0, rows)
        else:
            is_kept, *are_kept = order.kept.float().split(1, dim=1)
            total = gradient.index_select(0, first) * is_kept
            for rows, is_kept in zip(others, are_kept, strict=True):
                total.addcmul_(gradient.index_select(0, rows), is_kept)
        return total.to(gradient.dtype), None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, order):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, weights)
        ctx.order = order
        (first, *others), (factor, *factors) = order.choices, weights.split(1, dim=1)
        total = rows.index_select(0, first) * factor
        for selected, factor in zip(others, factors, strict=True):
            total.addcmul_(rows.index_select(0, selected), factor)
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        rows, weights = ctx.saved_tensors
        order = ctx.order
        row_gradients = gradient.index_select(0, order.tokens)  # [rows, h]
        products = (row_gradients * rows).sum(dim=-1, dtype=weights.dtype)
        # unfilled rows get the weight 0; dropped pairs have the weight 0, so their arbitrary positions do no harm
        sorted_weights = torch.zeros_like(products).scatter_add_(0, order.positions.flatten(), weights.flatten())
        row_gradients.mul_(sorted_weights.unsqueeze(1))
        return row_gradients, products[order.positions], None
