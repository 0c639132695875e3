"""How attention to cached keys is bounded; the queries are always the last positions of the keys."""

from __future__ import annotations

import torch

from megatron.errors import ConfigError
from megatron.kernels.attention.bounds import local_bias
from megatron.model.interface.step_context import MaskKind, StepContext


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
        float32, since half precision cannot represent distances.

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
