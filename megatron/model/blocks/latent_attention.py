"""Multi-head latent attention: all heads make their keys and values of one latent, which is what generation keeps."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.kernels.rotary import rotate_both
from megatron.model.blocks.attention import SelfAttention
from megatron.model.blocks.norm import build_norm
from megatron.model.blocks.position import rotation
from megatron.model.interface.key_value_cache import CachedText
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import Dimension, ShardSpec, check_divisible, place
from megatron.parallel.tensor.collectives import copy_to, gather_sequence
from megatron.parallel.tensor.layers import ColumnParallelLinear
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue, deferrable_linear


class LatentProjection(nn.Module):
    """`y = x W^T + b` on every tensor-parallel rank alike; with sequence parallelism of each rank's own tokens, so that
    gradients are sums over the ranks.

    Attributes:
        queue: as in `ColumnParallelLinear`.

    Shapes: x `[b, s/t, h]`; result `[b, s/t, output]`; weight `[output, h]`, bias `[output]`.
    """

    def __init__(self, output_size: int, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.queue: WeightGradientQueue | None = None
        outputs, partial = Dimension("channels of a latent", output_size), mesh.sequence_parallel
        dimensions = (outputs, Dimension("hidden", config.hidden_size))
        spec = ShardSpec(dimensions, is_matrix=True, summed_over=(partial,))
        self.weight = place(nn.Parameter(torch.zeros(spec.local_shape, device=mesh.device)), spec)
        self.bias: nn.Parameter | None = None
        if config.add_qkv_bias:
            vector = ShardSpec.vector(output_size, partial=partial)
            self.bias = place(nn.Parameter(torch.zeros(output_size, device=mesh.device)), vector)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Applies the layer."""
        return deferrable_linear(x, self.weight, self.bias, self.queue)


class LatentAttention(SelfAttention):
    """Attention whose keys and values are made of a latent of `kv_lora_rank` channels per token, and whose queries may
    be made of one as well.

    Of a head's queries and keys, `qk_head_dim` channels have no positions, and the other `qk_pos_emb_head_dim` are
    rotated; these keys come from the hidden states, one for all heads. The latents are the same on all tensor-parallel
    ranks, or with sequence parallelism of each rank's tokens, and the projections out of them are split by heads.

    Values are padded with zeros to the width of the keys, which every form of attention takes; the padding of what they
    add up to is cut off.

    A key-value cache holds the latent and the rotated key of a token, and no values. Where many queries attend to them,
    as those of a prompt do, keys and values are made of these again. Few queries are multiplied by the half of the
    projection that makes keys instead, and results by the other half: attention then is to one head of as many channels
    as the cache holds, and nothing is computed for earlier tokens.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 and appendix C; names of the projections: NVIDIA Megatron-LM
    `megatron/core/transformer/multi_latent_attention.py`.
    """

    def build_projections(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        """Builds the projections to latents and out of them, and the norms between.

        Raises:
            ConfigError: the number of heads is not divisible by the tensor-parallel size.
        """
        heads, latent, queries = self.query_dimension, config.kv_lora_rank, config.q_lora_rank
        check_divisible(heads.size, mesh.tp, f"attention heads (--num-attention-heads {heads.size})")
        self.tp, self.latent_size = mesh.tp, latent
        self.plain_size, self.rotary_size = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.value_size, self.padding = config.v_head_dim, config.kv_channels - config.v_head_dim
        self.linear_q_down_proj: LatentProjection | None = None
        self.q_layernorm = _built_norm(config, mesh, queries)
        self.kv_layernorm = _built_norm(config, mesh, latent)

        def by_heads(input_size: int, channels: int) -> ColumnParallelLinear:
            outputs = (heads, Dimension("channels of a head", channels))
            return ColumnParallelLinear(input_size, outputs, mesh.tp, bias=False, device=mesh.device)

        if queries is None:
            self.linear_q_proj = by_heads(config.hidden_size, config.kv_channels)
        else:
            self.linear_q_down_proj = LatentProjection(queries, config, mesh)
            self.linear_q_up_proj = by_heads(queries, config.kv_channels)
        self.linear_kv_down_proj = LatentProjection(config.latent_width, config, mesh)
        self.linear_kv_up_proj = by_heads(latent, config.qk_head_dim + config.v_head_dim)
        self.linear_kv_up_proj.divides_weight = True

    def _heads(
        self, hidden: torch.Tensor, context: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys and values, and no gates; with a cache queries, what it keeps, and no values.

        Shapes: `[b, s/t, h]` or `[b * s, h]` to thrice `[b, a/t, s, d]`; with a cache to `[b, a/t, s, d]`,
            `[b, 1, s, c]` and `[b, 1, s, 0]`, c the width of what it keeps.
        """
        hidden, is_split = context.by_sample(hidden), context.splits_sequence
        query = self._queries(hidden, is_split).unflatten(-1, (-1, self.config.kv_channels)).transpose(1, 2)
        latent, shared = self.linear_kv_down_proj(hidden).split([self.latent_size, self.rotary_size], dim=-1)
        latent = self.kv_layernorm(latent)  # [b, s/t, kv_lora_rank]
        shared = gather_sequence(shared, self.tp) if is_split else copy_to(shared, self.tp)
        plain, rotary = query.split([self.plain_size, self.rotary_size], dim=-1)
        rotary, shared = rotate_both(
            rotary,
            shared.unsqueeze(1),  # [b, 1, s, qk_pos_emb_head_dim]
            *rotation(self.config, self.layer, context, query.shape[2]),
            interleaved=self.config.rotary_interleaved,
            implementation=self.kernels.rotary,
        )
        query = torch.cat((plain, rotary), dim=-1)
        if context.caches is not None:
            kept = torch.cat((latent.unsqueeze(1), shared), dim=-1)
            return query, kept, kept[..., :0], None
        return query, *self._expanded(latent, shared, is_split), None

    def _queries(self, hidden: torch.Tensor, is_split: bool) -> torch.Tensor:
        """Shapes: `[b, s/t, h]` to `[b, s, a/t * d]`."""
        if self.linear_q_down_proj is None:
            return self.linear_q_proj(hidden, splits_sequence=is_split)
        latent = self.q_layernorm(self.linear_q_down_proj(hidden))
        return self.linear_q_up_proj(latent, splits_sequence=is_split)

    def _expanded(
        self, latent: torch.Tensor, shared: torch.Tensor, is_split: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and padded values. Shapes: `[b, s/t, kv_lora_rank]` and `[b, 1, s, r]` to twice `[b, a/t, s, d]`."""
        expanded = self.linear_kv_up_proj(latent, splits_sequence=is_split)
        expanded = expanded.unflatten(-1, (-1, self.plain_size + self.value_size)).transpose(1, 2)
        key, value = expanded.split([self.plain_size, self.value_size], dim=-1)
        key = torch.cat((key, shared.expand(-1, key.shape[1], -1, -1)), dim=-1)
        return key, F.pad(value, (0, self.padding)) if self.padding else value

    def _halves(self) -> Sequence[torch.Tensor]:
        """What makes keys and values of a latent. Shapes: `[a/t, qk_head_dim, kv_lora_rank]` and the same of values."""
        weight = self.linear_kv_up_proj.weight.unflatten(0, (-1, self.plain_size + self.value_size))
        return weight.split([self.plain_size, self.value_size], dim=1)

    def _attend_cached(self, query: torch.Tensor, texts: Sequence[CachedText], context: StepContext) -> torch.Tensor:
        """Attention of new tokens to the latents of their texts. Shapes: query `[b, a/t, s, d]`; result of values."""
        queries = query.split([text.queries for text in texts], dim=2)
        return torch.cat([self._attend_latents(*each, context) for each in zip(queries, texts, strict=True)], dim=2)

    def _attend_latents(self, query: torch.Tensor, text: CachedText, context: StepContext) -> torch.Tensor:
        """The same of one text."""
        if self._expands(query.shape[2], text.keys.shape[2]):
            latent, shared = text.keys.split([self.latent_size, self.rotary_size], dim=-1)
            keys, values = self._expanded(latent.squeeze(1), shared)
            attended = super()._attend_cached(query, [text._replace(keys=keys, values=values)], context)
            return attended[..., : self.value_size]
        plain, rotary = query.split([self.plain_size, self.rotary_size], dim=-1)
        to_keys, to_values = self._halves()
        query = torch.cat((plain @ to_keys, rotary), dim=-1)  # [b, a/t, s, c]
        attended = super()._attend_cached(query, [text._replace(values=text.keys)], context)
        return attended[..., : self.latent_size] @ to_values.transpose(1, 2)

    def _expands(self, queries: int, keys: int) -> bool:
        """Whether to make keys and values takes fewer operations than to attend to latents, which are wider."""
        of_key = self.latent_size * (self.plain_size + self.value_size)
        of_pair = 2 * self.latent_size - self.plain_size - self.value_size
        return queries * (keys * of_pair + of_key) >= keys * of_key

    def _joined(self, attended: torch.Tensor, gate: torch.Tensor | None, dimensions: int) -> torch.Tensor:
        return super()._joined(attended[..., : self.value_size], gate, dimensions)


def _built_norm(config: ModelConfig, mesh: ParallelMesh, size: int | None) -> nn.Module:
    """The norm of a latent, or what leaves it as it is."""
    if size is None or not config.qk_layernorm:
        return nn.Identity()
    return build_norm(config, mesh, size, partial=mesh.sequence_parallel, epsilon=config.latent_layernorm_epsilon)
