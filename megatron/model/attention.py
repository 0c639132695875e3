"""Causal self-attention, its heads split over the tensor axis."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron import kernels
from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.parallel.layers import ColumnParallelLinear, RowParallelLinear, check_divisible
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.rng import attention_dropout, attention_seed, seeded


class KeyValueCache:
    """The keys and values one layer has seen, for generating token by token.

    Shapes: keys and values `[b, a/t, k, d]`; room for `capacity` tokens is taken at the first append.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0
        self._keys: torch.Tensor | None = None
        self._values: torch.Tensor | None = None

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the keys and values of new tokens and returns those of all tokens so far.

        Raises:
            ConfigError: there is no room left.
        """
        stop = self.length + keys.shape[2]
        if stop > self.capacity:
            raise ConfigError(
                f"{stop} tokens do not fit into a cache of {self.capacity}. Generate fewer tokens or shorten the "
                f"prompt (--out-seq-length, --max-position-embeddings)."
            )
        if self._keys is None or self._values is None:
            batch, heads, _, size = keys.shape
            self._keys = keys.new_empty(batch, heads, self.capacity, size)
            self._values = torch.empty_like(self._keys)
        self._keys[:, :, self.length : stop] = keys
        self._values[:, :, self.length : stop] = values
        self.length = stop
        return self._keys[:, :, :stop], self._values[:, :, :stop]

    def truncate(self, length: int) -> None:
        """Forgets what follows the first `length` tokens."""
        self.length = min(self.length, length)

    def select(self, rows: torch.Tensor) -> None:
        """Keeps only some sequences of the batch, or reorders them.

        Shapes: rows `[new b]` int64.
        """
        if self._keys is not None and self._values is not None:
            self._keys, self._values = self._keys[rows], self._values[rows]


class SelfAttention(nn.Module):
    """Multi-head causal attention.

    The rows of `linear_qkv` are ordered [heads, (query, key, value), head size], Megatron's order, so that a rank's
    block of rows is whole heads.

    Shapes: `[b, s, h]` to the same, replicated over the axis; inside `[b, a/t, s, d]`.

    With `--recompute-granularity selective` the core (scores, softmax, weighting) runs again during backward.

    Raises:
        ConfigError: the tensor-parallel size does not divide the heads.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        layer: int,
        *,
        seed: int,
        separate_segments: bool = False,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        heads, size = config.num_attention_heads, config.kv_channels
        check_divisible(heads, mesh.tp, f"attention heads (--num-attention-heads {heads})")
        self.layer, self.seed, self.tp_rank = layer, seed, mesh.tp.rank
        self.head_size = size
        self.dropout = config.attention_dropout
        self.separate_segments = separate_segments
        self.recompute = recompute
        self.linear_qkv = ColumnParallelLinear(config.hidden_size, 3 * heads * size, mesh.tp, device=mesh.device)
        self.linear_proj = RowParallelLinear(heads * size, config.hidden_size, mesh.tp, device=mesh.device)

    def forward(
        self,
        hidden: torch.Tensor,
        sample_ids: torch.Tensor,
        segment_ids: torch.Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        """Attends.

        Args:
            segment_ids: documents that may not see each other, if the layer was told to separate them. `[b, s]`
            cache: holds the keys and values of earlier tokens; `hidden` then is of the new tokens only.
        """
        batch, length, _ = hidden.shape
        qkv = self.linear_qkv(hidden).view(batch, length, -1, 3, self.head_size)  # [b, s, a/t, 3, d]
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(3))  # [b, a/t, s, d]
        before = 0
        if cache is not None:
            before = cache.length
            key, value = cache.append(key, value)  # [b, a/t, k, d]
        mask = self._mask(segment_ids, before, length, hidden.device)
        core = (query, key, value, mask, length, sample_ids)
        if self.recompute and self.training and torch.is_grad_enabled():
            context = checkpoint(self._attend, *core, use_reentrant=False, preserve_rng_state=False)
        else:
            context = self._attend(*core)
        return self.linear_proj(context.transpose(1, 2).reshape(batch, length, -1))

    def _mask(
        self, segment_ids: torch.Tensor | None, before: int, length: int, device: torch.device
    ) -> torch.Tensor | None:
        """The mask where plain causality is not enough: `[b or 1, 1, s, k]` bool, or None."""
        if self.separate_segments and segment_ids is not None:
            if before:
                raise ConfigError(
                    "Generation with a cache cannot separate documents (--reset-attention-mask). Drop the flag."
                )
            return segment_mask(segment_ids)
        if before and length > 1:
            causal = torch.ones(length, before + length, dtype=torch.bool, device=device).tril(before)
            return causal[None, None]
        return None

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        length: int,
        sample_ids: torch.Tensor,
    ) -> torch.Tensor:
        causal = mask is None and length > 1
        if not self.training or self.dropout == 0:
            return kernels.attention(query, key, value, mask=mask, causal=causal)
        if not query.is_cuda:
            return kernels.explicit_attention(query, key, value, partial(self._drop, sample_ids), mask=mask)
        with seeded(attention_seed(self.seed, sample_ids, self.layer, self.tp_rank), query.device):
            return kernels.attention(query, key, value, mask=mask, causal=causal, dropout=self.dropout)

    def _drop(self, sample_ids: torch.Tensor, probabilities: torch.Tensor) -> torch.Tensor:
        return attention_dropout(
            probabilities,
            self.dropout,
            seed=self.seed,
            layer=self.layer,
            sample_ids=sample_ids,
            first_head=self.tp_rank * probabilities.shape[1],
        )


def segment_mask(segment_ids: torch.Tensor) -> torch.Tensor:
    """Which keys a query sees: not later, and in the same document. Kept on the tensor, so a stage builds it once a
    micro batch.

    Shapes: `[b, s]` to `[b, 1, s, s]` bool.
    """
    known = getattr(segment_ids, "_segment_mask", None)
    if known is None or known[0] != segment_ids._version:
        same = segment_ids.unsqueeze(2) == segment_ids.unsqueeze(1)  # [b, s, s]
        known = (segment_ids._version, same.tril().unsqueeze(1))
        segment_ids._segment_mask = known  # type: ignore[attr-defined]
    return known[1]
