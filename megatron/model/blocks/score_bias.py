"""How attention is bounded: causal mask, document boundaries, prefixes, sliding windows, linear biases.

The queries of attention to cached keys are always the last positions of the keys.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.errors import ConfigError
from megatron.kernels.attention.bounded import AttentionPlan, plan_attention
from megatron.kernels.attention.bounds import Bounds, local_bias
from megatron.kernels.attention.partial import PartialAttention
from megatron.model.interface.step_context import MaskKind, StepContext
from megatron.parallel.sequence.ring import RingPlan
from megatron.parallel.sequence.tiles import Visibility


def score_bias(
    context: StepContext,
    query: torch.Tensor,
    window: int | None,
    slopes: Sequence[float] = (),
    *,
    bidirectional: bool = False,
) -> torch.Tensor | None:
    """The bias of the scores of a micro-batch; None if the plain causal mask, or none in both directions, suffices.

    It is built once per micro-batch for all layers with the same window and slopes.

    Shapes: query `[b, a/t, s, d]`; result `[b or 1, 1 or a/t, s, s]`. A mask has the query's dtype; with slopes it is
        float32 on a CPU.

    Args:
        window: tokens that a token may attend to, itself included; None for all.
        slopes: this rank's slopes of a linear bias; empty for none.
        bidirectional: whether tokens attend to later ones.
    """
    length = query.shape[2]
    separate = context.mask is MaskKind.DOCUMENTS
    if window is not None and window >= length:
        window = None
    if not (separate or window or slopes or context.prefix_mask is not None):
        return None
    return context.once(
        ("score bias", window, tuple(slopes), length, query.dtype),
        lambda: _build(context, window, slopes, query, bidirectional),
    )


def bounded_plan(
    context: StepContext,
    query: torch.Tensor,
    window: int | None,
    slopes: Sequence[float] = (),
    softcap: float | None = None,
    *,
    bidirectional: bool = False,
) -> AttentionPlan | None:
    """Attention of a micro-batch without s x s biases and without dropout; None if `score_bias` is to be used.

    Shapes: query `[b, a/t, s, d]`.
    """
    segments = context.segment_ids if context.mask is MaskKind.DOCUMENTS else None
    return context.once(
        ("attention plan", window, tuple(slopes), softcap, query.shape[2], query.dtype),
        lambda: plan_attention(
            query, Bounds(segments, window, tuple(slopes), context.prefix_mask, bidirectional), softcap
        ),
    )


def ring_plan(
    context: StepContext,
    query: torch.Tensor,
    attention: PartialAttention,
    seen: Visibility,
    slopes: tuple[float, ...] = (),
) -> RingPlan:
    """What this rank of a ring computes of a micro-batch, for all layers with the same bounds.

    Shapes: query `[b, a/tu, s/r, d]`.

    Raises:
        ConfigError: the ranks of this context share no samples, or its samples have prefixes.
    """
    split, length = context.split, query.shape[2]
    if split is None or context.prefix_mask is not None:
        raise ConfigError(
            "Attention in a ring (--cp-comm-type p2p) needs samples that ranks share and that have no prefixes. Use "
            "--cp-comm-type a2a."
        )
    segments = context.segment_ids if context.mask is MaskKind.DOCUMENTS else None
    return context.once(
        ("ring", attention, seen, slopes, length),
        lambda: RingPlan.of(split, length * split.ring.size, segments, attention, seen, slopes, query.device),
    )


def visible_keys(keys: torch.Tensor, queries: int, window: int | None) -> torch.Tensor:
    """The keys that the last `queries` positions may attend to in a sliding window, a view of the last ones.

    Shapes: `[b, g, k, d]` to `[b, g, at most queries + window - 1, d]`.
    """
    if window is None or keys.shape[2] <= queries + window - 1:
        return keys
    return keys.narrow(2, keys.shape[2] - (queries + window - 1), queries + window - 1)


def cached_bias(
    context: StepContext,
    query: torch.Tensor,
    keys: int,
    window: int | None,
    slopes: tuple[float, ...] = (),
    prefix: int = 0,
) -> torch.Tensor | None:
    """The bias of the scores of new tokens; None if the plain causal mask suffices.

    It is built once per step for all layers and texts of the same lengths.

    Shapes: query `[b, a/t, s, d]`; result `[1, 1 or a/t, s, keys]`. A mask has the query's dtype; with slopes it is
        float32 on a CPU.

    Args:
        keys: number of visible keys.
        window: tokens that a token may attend to, itself included; None for all.
        slopes: this rank's slopes of a linear bias; empty for none.
        prefix: how many of the text's first tokens attend to each other in both directions.

    Raises:
        ConfigError: documents are to be separated.
    """
    length = query.shape[2]
    if context.mask is MaskKind.DOCUMENTS and keys > length:
        raise ConfigError(
            "Generation with a key-value cache cannot separate documents (--reset-attention-mask). Remove the flag."
        )
    if window is not None and window >= keys:
        window = None
    if prefix > 1 and length == keys:  # later tokens come after it, and see what is visible to all
        return context.once(
            ("cached bias", length, keys, window, slopes, query.dtype, prefix),
            lambda: local_bias(query, keys, window, slopes, torch.arange(keys, device=query.device)[None] < prefix),
        )
    if not slopes and (length == 1 or (window is None and keys == length)):
        return None
    return context.once(
        ("cached bias", length, keys, window, slopes, query.dtype), lambda: local_bias(query, keys, window, slopes)
    )


def _build(
    context: StepContext, window: int | None, slopes: Sequence[float], query: torch.Tensor, bidirectional: bool
) -> torch.Tensor:
    bias = local_bias(
        query, query.shape[2], window, tuple(slopes), context.prefix_mask, bidirectional=bidirectional
    )  # [1 or b, 1 or a/t, s, s]
    if context.mask is MaskKind.DOCUMENTS and context.segment_ids is not None:
        segments = context.segment_ids
        foreign = segments.unsqueeze(2) != segments.unsqueeze(1)  # [b, s, s]
        bias = bias.masked_fill(foreign.unsqueeze(1), float("-inf"))
    return bias
