"""Which keys a query sees, and tensors that say so to the forms of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bounds:
    """What restricts attention, causal unless it is bidirectional, and what it does not hide.

    Shapes: segment_ids `[b, s]` int64, nondecreasing along s; prefix_mask `[b, s]` bool.

    Attributes:
        segment_ids: document number of each token; a token sees only its own document. None for no documents.
        window: tokens that a token may attend to, itself included; None for all.
        slopes: for each head, what a score loses per position of distance (ALiBi); empty for nothing.
        prefix_mask: keys that the queries before them see as well; windows and slopes then go by the distance in either
            direction. None for no such keys.
        bidirectional: whether queries see later keys too; windows and slopes go by the distance in either direction.
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

    The queries are the last of the keys' positions. Keys of a prefix, or all of them in bidirectional attention, are
    visible to the queries before them as well; windows and slopes then go by the distance in either direction.

    On a GPU it has the query's dtype, the only one that all of torch's fused kernels read right. Distances are counted
    from the query's own position, so that this costs little: bfloat16 keeps -x to within x/512, and weights a key with
    that bias by exp(-x), so that its weight is wrong by at most exp(-1)/512.

    Shapes: query `[b, a, s, d]`; prefix_mask `[b, keys]` bool; result `[1 or b, 1 or a, s, keys]`, in the query's
    dtype, on a CPU at least float32 if there are slopes.
    """
    positions = torch.arange(keys, device=query.device)
    distance = positions[keys - query.shape[2] :].unsqueeze(1) - positions  # [s, k], how far a key lies back
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
    """Where each document begins among the tokens of all samples, and at the end the number of tokens.

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
    """Which blocks of queries and keys have visible pairs, and in which of them all pairs are visible.

    It is computed from the first and last token of each block, without s x s entries.

    Shapes: segment_ids and prefix_mask `[b, s]`; both results `[b or 1, 1, blocks, blocks]` bool.

    Args:
        length: s.
        block: tokens per block; the last block may be incomplete.
    """
    first = torch.arange(0, length, block, device=device)  # [blocks]
    last = (first + block).clamp(max=length) - 1
    is_complete = first + block <= length
    visible = (last.unsqueeze(1) >= first)[None, None]  # [1, 1, queries' blocks, keys' blocks]
    whole = (first.unsqueeze(1) >= last)[None, None]
    if bidirectional:
        visible, whole = torch.ones_like(visible), torch.ones_like(whole)
    elif prefix_mask is not None:
        tokens = torch.nn.functional.pad(prefix_mask, (0, -length % block)).unflatten(1, (-1, block))  # [b, blocks, n]
        visible = visible | tokens.any(dim=2)[:, None, None]
        whole = whole | tokens.all(dim=2)[:, None, None]
    whole = whole & is_complete.unsqueeze(1) & is_complete
    if window is not None:
        nearest = torch.maximum(first.unsqueeze(1) - last, first - last.unsqueeze(1))
        furthest = torch.maximum(last.unsqueeze(1) - first, last - first.unsqueeze(1))
        visible, whole = visible & (nearest < window), whole & (furthest < window)
    if segment_ids is not None:
        opening, closing = segment_ids[:, None, first], segment_ids[:, None, last]  # [b, 1, blocks]
        queries, keys = (opening.unsqueeze(3), closing.unsqueeze(3)), (opening.unsqueeze(2), closing.unsqueeze(2))
        visible = visible & (queries[0] <= keys[1]) & (keys[0] <= queries[1])
        whole = whole & (queries[1] == keys[0]) & (keys[1] == queries[0])
    return visible, whole
