"""Scaled softmax over keys, plain, causal, masked or biased, with the stateless dropout of attention.

The compiled operation takes one pass over the scores; torch takes one each for scale, bias, mask, softmax and dropout.
It reads only the keys that a causal mask leaves visible, and keeps one tensor for backward: the probabilities before
dropout. Those after dropout follow from them and the hash, but not vice versa, since dropped probabilities have
gradients, too; keeping the scores instead would require normalizing them again.
"""

from __future__ import annotations

from typing import Any

import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import Dropout, dropout_add, operands

_INFINITY = float("inf")


def scaled_softmax(
    scores: torch.Tensor,
    scale: float = 1.0,
    *,
    causal: bool = False,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    dropout: Dropout | None = None,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """`dropout(softmax(scale * scores + bias))` in float32, rounded to the scores' dtype; 0 where every key is hidden.

    Shapes: scores `[b, a, q, k]`; mask and bias `[b or 1, 1 or a, q or 1, k]`; rows of the dropout `[b, a, q]`; result
    as scores.

    Args:
        causal: hides the keys after their query. The queries are the last q of the k positions.
        mask: bool, True for hidden keys.
        bias: added to the scaled scores; float32 or of the scores' dtype.

    Source: Vaswani et al., "Attention is all you need", 2017, equation 1.
    """
    if implementation is Implementation.CSRC:
        result, _ = torch.ops.megatron.softmax(scores, scale, causal, mask, bias, *operands(dropout))
        return result  # type: ignore[no-any-return]
    wide = scores.to(torch.promote_types(scores.dtype, torch.float32)) * scale
    if bias is not None:
        wide = wide + bias
    if mask is not None:
        wide = wide.masked_fill(mask, -_INFINITY)
    if causal:
        queries, keys = scores.shape[-2:]
        later = torch.ones(queries, keys, dtype=torch.bool, device=scores.device).triu_(keys - queries + 1)
        wide = wide.masked_fill(later, -_INFINITY)
    is_hidden = (wide == -_INFINITY).all(dim=-1, keepdim=True)  # [b, a, q, 1]
    probabilities = wide.masked_fill(is_hidden, 0.0).softmax(dim=-1).masked_fill(is_hidden, 0.0)
    return dropout_add(probabilities.to(scores.dtype), dropout)


def register() -> None:
    """Registers the result shapes of the compiled operation with torch; once, after the library is loaded."""
    torch.library.register_fake("megatron::softmax", _shapes)
    torch.library.register_fake("megatron::softmax_backward", lambda gradient, *_: gradient.new_empty(gradient.shape))


def _shapes(
    scores: torch.Tensor, scale: float, causal: bool, mask: Any, bias: Any, rows: torch.Tensor | None, *_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    return scores.new_empty(scores.shape), scores.new_empty(0 if rows is None else scores.shape)
