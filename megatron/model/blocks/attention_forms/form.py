"""What a layer of attention is put together from: a projection to heads, and a form in which these attend."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.config.architecture.attention import VANILLA
from megatron.config.architecture.positions import ALIBI
from megatron.kernels.attention.partial import PartialAttention
from megatron.kernels.choice import Kernels
from megatron.model.blocks.dropout import DropoutSite
from megatron.model.blocks.position import Rotary, alibi_slopes
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.rng import attention_keys
from megatron.parallel.sequence.ulysses import own_heads
from megatron.parallel.shard_spec import Dimension

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


@dataclass(frozen=True, eq=False)
class Scoring:
    """How the heads of a layer score keys, and which scores count.

    Attributes:
        layer: index of the block.
        softcap: scores become `softcap * tanh(score / softcap)`.
        window: tokens that a token may attend to, itself included; None for all.
        slopes: of the linear biases of this rank's heads; empty for none.
        bidirectional: whether tokens attend to later ones.
        dropout: share of the probabilities that training drops.
        part: which of the equal parts of all heads this rank has.
        has_sinks: whether the softmax has one more logit than keys: 0, or that of `softmax_offset`.
        exchange: the ranks that have exchanged positions for heads.
    """

    layer: int
    scale: float
    softcap: float | None
    window: int | None
    slopes: tuple[float, ...]
    bidirectional: bool
    dropout: float
    site: DropoutSite
    kernels: Kernels
    part: int
    has_sinks: bool
    softmax_offset: nn.Parameter | None
    exchange: Axis

    @classmethod
    def of(cls, config: ModelConfig, mesh: ParallelMesh, layer: int, softmax_offset: nn.Parameter | None) -> Scoring:
        """That of a block. Shapes: softmax_offset `[a/t]`."""
        slopes: tuple[float, ...] = ()
        if config.position_embedding_type == ALIBI:
            heads = Dimension("attention heads", config.num_attention_heads, mesh.tp)
            slopes = tuple(alibi_slopes(heads.size)[slice(*heads.bounds)])
        return cls(
            layer,
            config.softmax_scale or 1 / math.sqrt(config.kv_channels),
            config.attention_logit_softcap,
            config.window_of(layer),
            slopes,
            config.bidirectional,
            config.attention_dropout,
            DropoutSite(layer, attention_keys),
            mesh.kernels,
            mesh.tp.rank,
            config.softmax_type != VANILLA,
            softmax_offset,
            Axis.single("sp"),
        )

    def exchanged(self, axis: Axis) -> Scoring:
        """That of the heads which this rank has after an exchange of positions for heads."""
        slopes, part = own_heads(self.slopes, axis), self.part * axis.size + axis.rank
        return dataclasses.replace(self, slopes=slopes, part=part, exchange=axis)

    def partial(self, context: StepContext) -> PartialAttention:
        """Attention to some keys, to be merged with that to others, or with the sinks."""
        return PartialAttention(self.scale, self.softcap, context.explicit_attention)

    def sinks(self, query: torch.Tensor) -> torch.Tensor:
        """The sinks of the heads, if they have any. Shapes: query `[b, a/tu, s, d]`; result `[a/tu]`."""
        offset = self.softmax_offset
        return query.new_zeros(query.shape[1]) if offset is None else own_heads(offset, self.exchange)
