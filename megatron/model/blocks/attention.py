"""Causal self-attention with heads split over the tensor-parallel axis."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.errors import ConfigError
from megatron.kernels.attention import attention, explicit_attention
from megatron.model.interface.step_context import Recompute, StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.rng import attention_dropout, attention_seed, seeded
from megatron.parallel.shard_spec import Dimension, check_divisible
from megatron.parallel.tensor.layers import ColumnParallelLinear, RowParallelLinear


class SelfAttention(nn.Module):
    """Multi-head causal attention.

    The rows of `linear_qkv` are ordered [heads, (query, key, value), head size], Megatron's order, so that each rank
    holds the rows of whole heads.

    Shapes: `[b, s, h]` to the same, replicated over the axis; inside `[b, a/t, s, d]`.

    Args:
        layer: index of the block.
        residual_std: standard deviation of the output projection's initial weights.

    Raises:
        ConfigError: the number of heads is not divisible by the tensor-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int, residual_std: float) -> None:
        super().__init__()
        heads, size = config.num_attention_heads, config.kv_channels
        check_divisible(heads, mesh.tp, f"attention heads (--num-attention-heads {heads})")
        self.layer, self.tp_rank, self.head_size = layer, mesh.tp.rank, size
        self.scale = 1 / math.sqrt(size)
        self.dropout = config.attention_dropout
        outputs = (Dimension("attention heads", heads, mesh.tp), Dimension("qkv", 3), Dimension("head size", size))
        self.linear_qkv = ColumnParallelLinear(
            config.hidden_size, outputs, mesh.tp, init_std=config.init_method_std, device=mesh.device
        )
        self.linear_proj = RowParallelLinear(
            heads * size, config.hidden_size, mesh.tp, init_std=residual_std, device=mesh.device
        )

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Applies attention.

        Raises:
            ConfigError: documents are to be separated while a key-value cache is in use.
        """
        batch, length, _ = hidden.shape
        qkv = self.linear_qkv(hidden).view(batch, length, -1, 3, self.head_size)  # [b, s, a/t, 3, d]
        query, key, value = (part.transpose(1, 2) for part in qkv.unbind(3))  # [b, a/t, s, d]
        before = 0
        if context.caches is not None:
            cache = context.caches[self.layer]
            before = cache.length
            key, value = cache.append(key, value)  # [b, a/t, k, d]
        bias = _attention_bias(context, before, query)
        if context.recompute is Recompute.ATTENTION and self.training and torch.is_grad_enabled():
            attended = checkpoint(
                self._attend, query, key, value, bias, context, use_reentrant=False, preserve_rng_state=False
            )
        else:
            attended = self._attend(query, key, value, bias, context)
        return self.linear_proj(attended.transpose(1, 2).reshape(batch, length, -1))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        bias: torch.Tensor | None,
        context: StepContext,
    ) -> torch.Tensor:
        """Computes scores, softmax and the weighted sum of values.

        Shapes: query `[b, a/t, s, d]`, key and value `[b, a/t, k, d]`.
        """
        causal = bias is None and query.shape[2] > 1
        if not self.training or self.dropout == 0:
            return attention(query, key, value, self.scale, bias=bias, causal=causal)
        if not query.is_cuda:
            return explicit_attention(
                query, key, value, self.scale, partial(self._drop, context), bias=bias, causal=causal
            )
        with seeded(attention_seed(context.seed, context.first_sample, self.layer, self.tp_rank), query.device):
            return attention(query, key, value, self.scale, bias=bias, causal=causal, dropout=self.dropout)

    def _drop(self, context: StepContext, probabilities: torch.Tensor) -> torch.Tensor:
        return attention_dropout(
            probabilities,
            self.dropout,
            seed=context.seed,
            layer=self.layer,
            sample_ids=context.sample_ids,
            first_head=self.tp_rank * probabilities.shape[1],
        )


def _attention_bias(context: StepContext, before: int, query: torch.Tensor) -> torch.Tensor | None:
    """The bias added to the attention scores, `[b or 1, 1, s, k]`; None if the plain causal mask suffices."""
    if context.attention_bias is not None:
        if before:
            raise ConfigError(
                "Generation with a key-value cache cannot separate documents (--reset-attention-mask). Remove the flag."
            )
        return context.attention_bias
    length = query.shape[2]
    if before and length > 1:
        bias = torch.full((length, before + length), float("-inf"), dtype=query.dtype, device=query.device)
        return bias.triu_(before + 1)[None, None]
    return None
