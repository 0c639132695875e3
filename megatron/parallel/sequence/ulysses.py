"""Ulysses: the ranks of an axis exchange positions for heads before attention, and heads for positions after it.

Attention runs on whole samples with fewer heads, so any form of it works.

Source: Jacobs et al., "DeepSpeed Ulysses", 2023, section 3.
"""

from __future__ import annotations

from typing import TypeVar

import torch
import torch.distributed as dist

from megatron.parallel.mesh import Axis

HeadValues = TypeVar("HeadValues", tuple[float, ...], torch.Tensor)


def to_heads(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, axis: Axis
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Exchanges positions for heads, in one message; key-value heads that several ranks need are sent to each.

    Shapes: `[b, a, s/u, d]` and twice `[b, g, s/u, d]` to `[b, a/u, s, d]` and twice `[b, n, s, d]`, where n divides
    a/u.
    """
    if axis.size == 1:
        return query, key, value
    ranks, heads = axis.size, query.shape[1] // axis.size
    chosen = _key_heads(query.shape[1], key.shape[1], ranks)
    if chosen != list(range(key.shape[1])):
        key, value = key[:, chosen], value[:, chosen]
    parts = [part.unflatten(1, (ranks, -1)) for part in (query, key, value)]  # [b, u, n, s/u, d]
    joined = torch.cat(parts, dim=2).transpose(0, 1)  # [u, b, n, s/u, d]
    whole = _Exchange.apply(joined, axis).permute(1, 2, 0, 3, 4).flatten(2, 3)  # [b, n, s, d]
    key_heads = (whole.shape[1] - heads) // 2
    return whole.split([heads, key_heads, key_heads], dim=1)  # type: ignore[return-value]


def to_positions(attended: torch.Tensor, axis: Axis) -> torch.Tensor:
    """Exchanges heads for positions. Shapes: `[b, a/u, s, d]` to `[b, a, s/u, d]`."""
    if axis.size == 1:
        return attended
    parts = attended.unflatten(2, (axis.size, -1)).permute(2, 0, 1, 3, 4)  # [u, b, a/u, s/u, d]
    return _Exchange.apply(parts, axis).transpose(0, 1).flatten(1, 2)  # type: ignore[no-any-return]


def local_heads(values: HeadValues, axis: Axis) -> HeadValues:
    """Selects, from a value per head before the exchange, those of this rank's heads after it."""
    count = len(values) // axis.size
    return values[axis.rank * count : (axis.rank + 1) * count] if axis.size > 1 else values


def _key_heads(heads: int, groups: int, ranks: int) -> list[int]:
    """The key-value heads of all ranks, rank by rank, the same number for each."""
    size, local = heads // groups, heads // ranks
    needed = [[head // size for head in range(first, first + local)] for first in range(0, heads, local)]
    if local % size == 0 or size % local == 0:  # whole groups, or parts of one
        needed = [sorted(set(groups_of_rank)) for groups_of_rank in needed]
    return [group for groups_of_rank in needed for group in groups_of_rank]


class _Exchange(torch.autograd.Function):
    """Sends part i of the first dimension to rank i; the received parts are in the order of their ranks."""

    @staticmethod
    def forward(ctx, parts, axis):  # type: ignore[no-untyped-def]
        ctx.axis = axis
        return _exchanged(parts, axis)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        return _exchanged(gradient, ctx.axis), None


def _exchanged(parts: torch.Tensor, axis: Axis) -> torch.Tensor:
    sent = parts.contiguous()
    received = torch.empty_like(sent)
    with axis.timed():
        dist.all_to_all_single(received, sent, group=axis.group)
    return received
