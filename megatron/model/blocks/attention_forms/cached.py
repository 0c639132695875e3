"""Attention of new tokens to their texts, whose earlier keys and values are cached.

The queries are always at the last positions of the keys.
"""

from __future__ import annotations

import torch

from megatron.errors import ConfigError
from megatron.kernels.attention.bounds import local_bias
from megatron.model.blocks.attention_forms.form import Heads, Scoring
from megatron.model.blocks.attention_forms.inner import build_inner
from megatron.model.interface.key_value_cache import CachedText
from megatron.model.interface.step_context import MaskKind, StepContext
from megatron.parallel.tensor.direct_module import DirectModule


class CachedAttention(DirectModule):
    """Appends the new keys and values to the caches, and attends to each text separately."""

    def __init__(self, scoring: Scoring) -> None:
        super().__init__()
        self.scoring, self.inner = scoring, build_inner(scoring)

    def attend(self, heads: Heads, context: StepContext) -> torch.Tensor:
        """Shapes: query `[b, a/t, s, d]`, the new tokens of the texts one after another along s; result as query.

        Raises:
            ConfigError: documents are separated, or the network is bidirectional, so that later tokens would change
                cached keys and values.
        """
        if self.scoring.bidirectional:
            raise ConfigError(
                "Generation with a key-value cache requires a causal network, and this one is bidirectional "
                "(--bidirectional): every new token would change the earlier ones. Use a GPT checkpoint."
            )
        query, key, value = heads
        texts = context.caches.append(self.scoring.layer, key, value)  # type: ignore[union-attr]
        if len(texts) == 1:
            return self.attend_text(query, texts[0], context)
        queries = query.split([text.queries for text in texts], dim=2)
        return torch.cat([self.attend_text(*each, context) for each in zip(queries, texts, strict=True)], dim=2)

    def attend_text(self, query: torch.Tensor, text: CachedText, context: StepContext) -> torch.Tensor:
        """Attention to one text. Shapes: query `[b, a/t, s, d]` of this text; result as query."""
        key, value = (visible_keys(part, text.queries, self.scoring.window) for part in (text.keys, text.values))
        bias = cached_bias(context, query, key.shape[2], self.scoring, text.prefix)
        return self.inner.attend(query, key, value, bias is None and text.queries > 1, bias, context)


def visible_keys(keys: torch.Tensor, queries: int, window: int | None) -> torch.Tensor:
    """The keys that the last `queries` positions may attend to in a sliding window, as a view.

    Shapes: `[b, g, k, d]` to `[b, g, at most queries + window - 1, d]`.
    """
    if window is None or keys.shape[2] <= queries + window - 1:
        return keys
    return keys.narrow(2, keys.shape[2] - (queries + window - 1), queries + window - 1)


def cached_bias(
    context: StepContext, query: torch.Tensor, keys: int, scoring: Scoring, prefix: int = 0
) -> torch.Tensor | None:
    """The bias of the scores of new tokens; None if the plain causal mask suffices.

    It is built once per step for all layers and texts of the same lengths.

    Shapes: query `[b, a/t, s, d]`; result `[1, 1 or a/t, s, keys]`. A mask has the query's dtype; with slopes it is
        float32 on a CPU.

    Args:
        keys: number of visible keys.
        prefix: number of first tokens of the text that attend to each other in both directions.

    Raises:
        ConfigError: documents are separated.
    """
    length, window, slopes = query.shape[2], scoring.window, scoring.slopes
    if context.mask is MaskKind.DOCUMENTS and keys > length:
        raise ConfigError(
            "Generation with a key-value cache cannot separate documents (--reset-attention-mask). Remove the flag."
        )
    if window is not None and window >= keys:
        window = None
    if prefix > 1 and length == keys:  # tokens after the prefix see all of it anyway
        return context.once(
            ("cached bias", length, keys, window, slopes, query.dtype, prefix),
            lambda: local_bias(query, keys, window, slopes, torch.arange(keys, device=query.device)[None] < prefix),
        )
    if not slopes and (length == 1 or (window is None and keys == length)):
        return None
    return context.once(
        ("cached bias", length, keys, window, slopes, query.dtype), lambda: local_bias(query, keys, window, slopes)
    )
