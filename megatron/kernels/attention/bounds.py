"""The bounds of attention, and the tensors that pass them to its forms."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bounds:
    """The bounds of attention, which is causal unless bidirectional.

    Shapes: segment_ids `[b, s]` int64, nondecreasing along s; prefix_mask `[b, s]` bool.

    Attributes:
        segment_ids: document number of each token, which attends only to its document; None for no documents.
        window: number of tokens that a token may attend to, itself included; None for all.
        slopes: for each head, the penalty of a score per position of distance (ALiBi); empty for none.
        prefix_mask: keys that are visible to earlier queries as well; windows and slopes then count the distance in
            either direction. None for no such keys.
        bidirectional: later keys are visible, too; windows and slopes count the distance in either direction.
    """

    segment_ids: torch.Tensor | None = None
    window: int | None = None
    slopes: tuple[float, ...] = ()
    prefix_mask: torch.Tensor | None = None
    bidirectional: bool = False


def local_bias(
    query: torch.Tensor,
    keys: int,
    window: int | None,
    slopes: tuple[float, ...],
    prefix_mask: torch.Tensor | None = None,
    *,
    bidirectional: bool = False,
) -> torch.Tensor:
    """The bias of scores: -inf where a key is not visible, otherwise minus slope times distance.

    The queries are at the last of the keys' positions. Keys of a prefix, or all keys in bidirectional attention, are
    visible to earlier queries as well; windows and slopes then count the distance in either direction.

    On a GPU it has the query's dtype, the only one that all of torch's fused kernels read correctly. Distances are
    relative to the query's position, so that this costs little accuracy: bfloat16 rounds -x to within x/512, and the
    key's weight is exp(-x), which is off by at most exp(-1)/512.

    Shapes: query `[b, a, s, d]`; prefix_mask `[b, keys]` bool; result `[1 or b, 1 or a, s, keys]`, in the query's
    dtype, on a CPU at least float32 with slopes.
    """
    positions = torch.arange(keys, device=query.device)
    distance = positions[keys - query.shape[2] :].unsqueeze(1) - positions  # [s, k], distance back to the key
    if bidirectional:
        distance, prefix_mask = distance.abs(), None
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    if prefix_mask is not None:
        is_reachable = torch.ones_like(hidden) if window is None else distance.abs() < window
        hidden = hidden & ~(prefix_mask[:, None, None] & is_reachable)  # [b, 1, s, k]
        distance = distance.abs()
    if slopes:
        dtype = torch.promote_types(query.dtype, torch.float32)
        steepness = torch.tensor(slopes, dtype=dtype, device=query.device).view(1, -1, 1, 1)
        sloped = (-steepness * distance).masked_fill(hidden, -torch.inf)
        return sloped if query.device.type == "cpu" else sloped.to(query.dtype)
    bias = torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)
    return bias if prefix_mask is not None else bias[None, None]


def cumulative_lengths(segment_ids: torch.Tensor) -> torch.Tensor:
    """The index of each document's first token among the tokens of all samples, and the number of tokens at the end.

    Shapes: segment_ids `[b, s]`; result `[documents + 1]` int32.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return torch.cat((begins.flatten(), begins.new_ones(1))).nonzero().flatten().to(torch.int32)


def visible_blocks(
    segment_ids: torch.Tensor | None,
    window: int | None,
    length: int,
    block: int,
    device: torch.device,
    prefix_mask: torch.Tensor | None = None,
    *,
    bidirectional: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Finds the pairs of blocks with any visible (query, key) pair, and those where all are visible.

    Computed from the first and last token of each block, without s x s entries.

    Shapes: segment_ids and prefix_mask `[b, s]`; both results `[b or 1, 1, blocks, blocks]` bool.

    Args:
        length: s.
        block: tokens per block; the last block may be incomplete.
    """
    first = torch.arange(0, length, block, device=device)  # [blocks]
    last = (first + block).clamp(max=length) - 1
    is_complete = first + block <= length
    visible = (last.unsqueeze(1) >= first)[None, None]  # [1, 1, queries' blocks, keys' blocks]
    full = (first.unsqueeze(1) >= last)[None, None]
    if bidirectional:
        visible, full = torch.ones_like(visible), torch.ones_like(full)
    elif prefix_mask is not None:
        tokens = torch.nn.functional.pad(prefix_mask, (0, -length % block)).unflatten(1, (-1, block))  # [b, blocks, n]
        visible = visible | tokens.any(dim=2)[:, None, None]
        full = full | tokens.all(dim=2)[:, None, None]
    full = full & is_complete.unsqueeze(1) & is_complete
    if window is not None:
        nearest = torch.maximum(first.unsqueeze(1) - last, first - last.unsqueeze(1))
        furthest = torch.maximum(last.unsqueeze(1) - first, last - first.unsqueeze(1))
        visible, full = visible & (nearest < window), full & (furthest < window)
    if segment_ids is not None:
        opening, closing = segment_ids[:, None, first], segment_ids[:, None, last]  # [b, 1, blocks]
        queries, keys = (opening.unsqueeze(3), closing.unsqueeze(3)), (opening.unsqueeze(2), closing.unsqueeze(2))
        visible = visible & (queries[0] <= keys[1]) & (keys[0] <= queries[1])
        full = full & (queries[1] == keys[0]) & (keys[1] == queries[0])
    return visible, full
