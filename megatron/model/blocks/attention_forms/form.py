"""The parts of an attention layer: a projection to heads, and a form of attention."""

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

# The output of a projection, for its forms: queries `[b, a/t, s, d]`, keys and values `[b, g/t, s, d]`, or any other
# tensors that both agree on.
Heads = tuple[torch.Tensor, ...]


class HeadProjection(Protocol):
    """The projection of hidden states to heads."""

    @property
    def parts(self) -> Mapping[str, nn.Module]:
        """Its modules by name in the layer, and so in checkpoints."""
        ...

    @property
    def rotary(self) -> Rotary | None:
        """Rotates queries and keys; None without rotary positions."""
        ...

    def project(self, hidden: torch.Tensor, context: StepContext) -> tuple[Heads, torch.Tensor | None]:
        """Projects to heads, with their positions applied, and to the gates of the heads' outputs, if any.

        Shapes: hidden `[b, s/t, h]` or `[b * s, h]`; gates `[b, s, a/t, d]`.
        """
        ...


class AttentionForm(Protocol):
    """A form of attention."""

    def attend(self, heads: Heads, context: StepContext) -> torch.Tensor:
        """Computes attention. Shapes: `[b, a/t, s, d]`."""
        ...


class Scoring:
    """The scores of a layer's heads, and their bounds.

    Args:
        layer: index of the block.
        softmax_offset: the sinks, if they are learned.
        exchange: the ranks that exchange positions for heads; None for none.

    Attributes:
        softcap: scores become `softcap * tanh(score / softcap)`.
        window: number of tokens that a token may attend to, itself included; None for all.
        slopes: slopes of the linear biases of this rank's heads; empty for none.
        bidirectional: True if tokens attend to later ones.
        dropout: probability of dropout.
        part: index of this rank's part among the equal parts of all heads.
        has_sinks: True if the softmax has one more logit than keys: 0, or that of `softmax_offset`.

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
        """Attention to a part of the keys, to be merged with other parts or with the sinks."""
        return PartialAttention(self.scale, self.softcap, context.explicit_attention)

    def sinks(self, query: torch.Tensor) -> torch.Tensor:
        """The sinks of the heads. Shapes: query `[b, a/tu, s, d]`; result `[a/tu]`."""
        offset = self.softmax_offset
        return query.new_zeros(query.shape[1]) if offset is None else local_heads(offset, self.exchange)
