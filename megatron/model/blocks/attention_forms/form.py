"""What a layer of attention is put together from: a projection to heads, and a form in which these attend."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.config.architecture.attention import VANILLA
from megatron.config.architecture.positions import ALIBI
from megatron.kernels.attention.partial import PartialAttention
from megatron.model.blocks.dropout import DropoutSite
from megatron.model.blocks.position import Rotary, alibi_slopes
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.rng import attention_keys
from megatron.parallel.sequence.ulysses import local_heads

# What a projection makes of hidden states for its forms: queries `[b, a/t, s, d]`, keys and values `[b, g/t, s, d]`, or
# whatever else both agree on.
Heads = tuple[torch.Tensor, ...]


class HeadProjection(Protocol):
    """How heads are made of hidden states."""

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """Its modules, by the names that they have in the layer, and so in checkpoints."""
        ...

    @property
    def rotary(self) -> Rotary | None:
        """Rotates queries and keys; None without rotary positions."""
        ...

    def project(self, hidden: torch.Tensor, context: StepContext) -> tuple[Heads, torch.Tensor | None]:
        """The heads with their positions, and the gates of what they will return, if there are any.

        Shapes: hidden `[b, s/t, h]` or `[b * s, h]`; gates `[b, s, a/t, d]`.
        """
        ...


class AttentionForm(Protocol):
    """How heads attend to each other's tokens."""

    def attend(self, heads: Heads, context: StepContext) -> torch.Tensor:
        """What the heads return for each token. Shapes: `[b, a/t, s, d]`."""
        ...


class Scoring:
    """How the heads of a layer score keys, and which scores count.

    Args:
        layer: index of the block.
        softmax_offset: the sinks, if they are learned.
        exchange: the ranks that have exchanged positions for heads; None for none.

    Attributes:
        softcap: scores become `softcap * tanh(score / softcap)`.
        window: tokens that a token may attend to, itself included; None for all.
        slopes: of the linear biases of this rank's heads; empty for none.
        bidirectional: whether tokens attend to later ones.
        dropout: share of the probabilities that training drops.
        part: which of the equal parts of all heads this rank has.
        has_sinks: whether the softmax has one more logit than keys: 0, or that of `softmax_offset`.

    Shapes: softmax_offset `[a/t]`.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        layer: int,
        softmax_offset: nn.Parameter | None = None,
        exchange: Axis | None = None,
    ) -> None:
        self.layer, self.kernels = layer, mesh.kernels
        self.scale, self.softcap = (
            config.softmax_scale or 1 / math.sqrt(config.kv_channels),
            config.attention_logit_softcap,
        )
        self.window, self.bidirectional = config.window_of(layer), config.bidirectional
        self.dropout, self.site = config.attention_dropout, DropoutSite(layer, attention_keys)
        self.has_sinks, self.softmax_offset = config.softmax_type != VANILLA, softmax_offset
        self.exchange = exchange or Axis.single("sp")
        self.part = mesh.tp.rank * self.exchange.size + self.exchange.rank
        self.slopes: tuple[float, ...] = ()
        if config.position_embedding_type == ALIBI:
            slopes = tuple(alibi_slopes(config.num_attention_heads))
            self.slopes = local_heads(local_heads(slopes, mesh.tp), self.exchange)

    def partial(self, context: StepContext) -> PartialAttention:
        """Attention to some keys, to be merged with that to others, or with the sinks."""
        return PartialAttention(self.scale, self.softcap, context.explicit_attention)

    def sinks(self, query: torch.Tensor) -> torch.Tensor:
        """The sinks of the heads, if they have any. Shapes: query `[b, a/tu, s, d]`; result `[a/tu]`."""
        offset = self.softmax_offset
        return query.new_zeros(query.shape[1]) if offset is None else local_heads(offset, self.exchange)
