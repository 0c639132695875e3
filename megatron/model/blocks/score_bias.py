"""What is added to attention scores: causal mask, document boundaries, sliding windows, linear biases."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron.errors import ConfigError
from megatron.model.interface.step_context import MaskKind, StepContext


def score_bias(
    context: StepContext, query: torch.Tensor, window: int | None, slopes: Sequence[float] = ()
) -> torch.Tensor | None:
    """The bias of the scores of a micro-batch; None if the plain causal mask suffices.

    It is built once per micro-batch for all layers with the same window and slopes.

    Shapes: query `[b, a/t, s, d]`; result `[b or 1, 1 or a/t, s, k]`, k the cached tokens and the new ones. A mask has
        the query's dtype; with slopes it is float32, since half precision cannot represent distances.

    Args:
        window: tokens that a token may attend to, itself included; None for all.
        slopes: this rank's slopes of a linear bias; empty for none.

    Raises:
        ConfigError: documents are to be separated while a key-value cache is in use.
    """
    before, length = context.position_offset if context.caches is not None else 0, query.shape[2]
    separate = context.mask is MaskKind.DOCUMENTS
    if separate and before:
        raise ConfigError(
            "Generation with a key-value cache cannot separate documents (--reset-attention-mask). Remove the flag."
        )
    if window is not None and window >= before + length:
        window = None
    if not (separate or window or slopes or (before and length > 1)):
        return None
    return context.once(
        ("score bias", window, tuple(slopes), length, query.dtype),
        lambda: _build(context, before, length, window, slopes, query),
    )


def _build(
    context: StepContext, before: int, length: int, window: int | None, slopes: Sequence[float], query: torch.Tensor
) -> torch.Tensor:
    keys = torch.arange(before + length, device=query.device)
    distance = keys[before:].unsqueeze(1) - keys  # [s, k], how far a key lies back
    visible = distance >= 0
    if window is not None:
        visible &= distance < window
    visible = visible[None, None]  # [1, 1, s, k]
    if context.mask is MaskKind.DOCUMENTS and context.segment_ids is not None:
        segments = context.segment_ids
        visible = visible & (segments.unsqueeze(2) == segments.unsqueeze(1)).unsqueeze(1)  # [b, 1, s, s]
    dtype = torch.float32 if slopes else query.dtype
    bias = torch.zeros(visible.shape, dtype=dtype, device=query.device)
    bias.masked_fill_(visible.logical_not(), float("-inf"))
    if slopes:
        bias = bias - torch.tensor(slopes, device=query.device)[:, None, None] * distance
    return bias
