"""How attention is bounded: causal mask, document boundaries, prefixes, sliding windows, linear biases.

Attention to cached keys is in `cached_bias.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.kernels.attention.bounded import AttentionPlan, plan_attention
from megatron.kernels.attention.bounds import Bounds, local_bias
from megatron.model.interface.step_context import MaskKind, StepContext


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
        float32, since half precision cannot represent distances.

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
