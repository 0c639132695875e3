"""Attention with documents, windows, linear biases and soft-caps on CUDA, without an s x s mask.

Packed documents and windows run on torch's variable-length flash attention (torch 2.10 and newer, half precision), the
rest on compiled flex attention. Neither has dropout.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from megatron.kernels.attention.bounds import Bounds, cumulative_lengths, visible_blocks
from megatron.kernels.attention.dense import repeated_heads
from megatron.kernels.choice import is_installed

BLOCK = 128  # tokens; the default of flex attention
# One kernel is compiled per combination of dtype, documents, prefixes, slopes, window and gradients, and one for the
# first length of each. Beyond torch's default limit of 8 the full score matrix would be computed, with a warning.
MOST_FLEX_KERNELS = 64


@dataclass(frozen=True)
class VarlenAttention:
    """Flash attention over packed documents.

    Shapes: starts `[documents + 1]` int32.

    Attributes:
        starts: index of each document's first token, and the number of tokens at the end.
        longest: upper bound of the documents' lengths, in tokens.
        window: number of tokens that a token may attend to, itself included; None for all.
        bidirectional: True if tokens attend to later ones.
    """

    starts: torch.Tensor
    longest: int
    window: int | None
    bidirectional: bool = False

    @classmethod
    def plan(cls, bounds: Bounds, query: torch.Tensor) -> VarlenAttention:
        """The plan of a micro-batch; synchronizes to read the number of documents.

        Shapes: query `[b, a, s, d]`.
        """
        batch, _, length, _ = query.shape
        if bounds.segment_ids is None:
            starts = torch.arange(0, batch * length + 1, length, dtype=torch.int32, device=query.device)
        else:
            starts = cumulative_lengths(bounds.segment_ids)
        return cls(starts, length, bounds.window, bounds.bidirectional)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """Applies attention.

        Shapes: query `[b, a, s, d]`, key and value `[b, g, s, d]`; result as query.
        """
        batch, heads, length, size = query.shape
        run, options = _varlen_attention(), {}
        if heads != key.shape[1]:
            if "enable_gqa" in inspect.signature(run).parameters:
                options["enable_gqa"] = True
            else:  # torch 2.10 and 2.11
                key, value = repeated_heads(key, heads), repeated_heads(value, heads)
        tokens = (part.transpose(1, 2).flatten(0, 1) for part in (query, key, value))  # [b*s, a or g, d]
        before = -1 if self.window is None else self.window - 1
        lengths = (self.starts, self.starts, self.longest, self.longest)
        after = before if self.bidirectional else 0
        attended = run(*tokens, *lengths, scale=scale, window_size=(before, after), **options)  # [b*s, a, d]
        return attended.view(batch, length, heads, size).transpose(1, 2)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class FlexAttention:
    """Flex attention over the visible blocks.

    Attributes:
        mask: the visible blocks.
        score: the change of a score at its positions; None for none.
    """

    mask: BlockMask
    score: Callable[..., torch.Tensor] | None

    @classmethod
    def plan(cls, bounds: Bounds, query: torch.Tensor, softcap: float | None) -> FlexAttention:
        """The plan of a micro-batch.

        Shapes: query `[b, a, s, d]`.
        """
        return cls(block_mask(bounds, query.shape[2], query.device), score_change(bounds, softcap, query.device))

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, *, compiled: bool = True
    ) -> torch.Tensor:
        """Applies attention.

        Shapes: query `[b, a, s, d]`, key and value `[b, g, s, d]`; result as query.

        Args:
            compiled: False for a slow form that keeps all scores.
        """
        run: Any = _compiled_flex_attention() if compiled else flex_attention
        grouped = query.shape[1] != key.shape[1]
        with torch._dynamo.config.patch(recompile_limit=MOST_FLEX_KERNELS):
            return run(query, key, value, score_mod=self.score, block_mask=self.mask, scale=scale, enable_gqa=grouped)


def has_varlen() -> bool:
    """True if torch has variable-length attention with windows and a scale: 2.10 and newer."""
    run = _varlen_attention()
    return run is not None and "window_size" in inspect.signature(run).parameters


def has_flex() -> bool:
    """True if flex attention can be compiled."""
    return is_installed("triton")


def block_mask(bounds: Bounds, length: int, device: torch.device) -> BlockMask:
    """The mask of flex attention: visible blocks, and the visible pairs of tokens in them."""
    segments, window, prefixes = bounds.segment_ids, bounds.window, bounds.prefix_mask
    bidirectional = bounds.bidirectional
    visible, full = visible_blocks(segments, window, length, BLOCK, device, prefixes, bidirectional=bidirectional)

    def is_visible(sample: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        seen = query >= (0 if bidirectional else key)
        if prefixes is not None:
            seen = seen | prefixes[sample, key]
        if window is not None:
            seen = seen & (query - key < window) & (key - query < window)
        if segments is not None:
            seen = seen & (segments[sample, query] == segments[sample, key])
        return seen

    return BlockMask.from_kv_blocks(
        *_listed(visible & ~full),
        *_listed(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(length, length),
    )


def score_change(bounds: Bounds, softcap: float | None, device: torch.device) -> Callable[..., torch.Tensor] | None:
    """The change of scaled scores: soft-cap, then linear bias; None for neither."""
    slopes = torch.tensor(bounds.slopes, device=device) if bounds.slopes else None
    if slopes is None and softcap is None:
        return None

    def change(
        score: torch.Tensor, sample: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        return score if slopes is None else score - slopes[head] * (query - key).abs()

    return change


@cache
def _varlen_attention() -> Any:
    """The function, or None before torch 2.9."""
    try:
        from torch.nn.attention.varlen import varlen_attn  # takes seconds, and is only needed on CUDA
    except ImportError:
        return None
    return varlen_attn


@cache
def _compiled_flex_attention() -> Any:
    """Flex attention, compiled for the first length, and for any length once there is a second one."""
    return torch.compile(flex_attention)


def _listed(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The number of marked blocks in each row, and a list of the columns with the marked ones first.

    Shapes: `[b, 1, rows, columns]` bool to `[b, 1, rows]` and `[b, 1, rows, columns]`, both int32.
    """
    columns = blocks.to(torch.int8).argsort(dim=-1, descending=True, stable=True)
    return blocks.sum(dim=-1, dtype=torch.int32), columns.to(torch.int32)
