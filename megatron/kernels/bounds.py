"""Which keys a query sees besides the causal rule, and tensors that say so to the forms of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Bounds:
    """What restricts causal attention further.

    Shapes: segment_ids `[b, s]` int64, nondecreasing along s.

    Attributes:
        segment_ids: document number of each token; a token sees only its own document. None for no documents.
        window: tokens that a token may attend to, itself included; None for all.
        slopes: for each head, what a score loses per position of distance (ALiBi); empty for nothing.
    """

    segment_ids: torch.Tensor | None = None
    window: int | None = None
    slopes: tuple[float, ...] = ()


def local_bias(query: torch.Tensor, keys: int, window: int | None, slopes: tuple[float, ...]) -> torch.Tensor:
    """The bias of scores: -inf where a key is not visible, otherwise minus slope times distance.

    The queries are the last of the keys' positions.

    Shapes: query `[b, a, s, d]`; result `[1, 1 or a, s, keys]`, in the query's dtype, at least float32 if there are
    slopes.
    """
    positions = torch.arange(keys, device=query.device)
    distance = positions[keys - query.shape[2] :].unsqueeze(1) - positions  # [s, k], how far a key lies back
    hidden = distance < 0
    if window is not None:
        hidden |= distance >= window
    if slopes:
        dtype = torch.promote_types(query.dtype, torch.float32)
        steepness = torch.tensor(slopes, dtype=dtype, device=query.device).view(1, -1, 1, 1)
        return (-steepness * distance).masked_fill_(hidden, -torch.inf)
    return torch.zeros(hidden.shape, dtype=query.dtype, device=query.device).masked_fill_(hidden, -torch.inf)[
        None, None
    ]


def cumulative_lengths(segment_ids: torch.Tensor) -> torch.Tensor:
    """Where each document begins among the tokens of all samples, and at the end the number of tokens.

    Shapes: segment_ids `[b, s]`; result `[documents + 1]` int32.
    """
    begins = torch.ones_like(segment_ids, dtype=torch.bool)
    begins[:, 1:] = segment_ids[:, 1:] != segment_ids[:, :-1]
    return torch.cat((begins.flatten(), begins.new_ones(1))).nonzero().flatten().to(torch.int32)


def visible_blocks(
    segment_ids: torch.Tensor | None, window: int | None, length: int, block: int, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """Which blocks of queries and keys have visible pairs, and in which of them all pairs are visible.

    It is computed from the first and last token of each block, without s x s entries.

    Shapes: segment_ids `[b, s]`; both results `[b or 1, 1, blocks, blocks]` bool.

    Args:
        length: s.
        block: tokens per block; the last block may be incomplete.
    """
    first = torch.arange(0, length, block, device=device)  # [blocks]
    last = (first + block).clamp(max=length) - 1
    visible = last.unsqueeze(1) >= first  # [queries' blocks, keys' blocks]
    whole = (first.unsqueeze(1) >= last) & (first + block <= length).unsqueeze(1)
    if window is not None:
        visible = visible & (first.unsqueeze(1) - last < window)
        whole = whole & (last.unsqueeze(1) - first < window)
    visible, whole = visible[None, None], whole[None, None]
    if segment_ids is not None:
        opening, closing = segment_ids[:, None, first], segment_ids[:, None, last]  # [b, 1, blocks]
        visible = visible & (opening.unsqueeze(3) <= closing.unsqueeze(2))
        whole = whole & (closing.unsqueeze(3) == opening.unsqueeze(2))
    return visible, whole
