"""Multi-head latent attention: the keys and values of all heads come from one latent, which generation caches."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.model.blocks.attention_forms.cached import CachedAttention
from megatron.model.blocks.attention_forms.form import AttentionForm, Heads, Scoring
from megatron.model.blocks.norm import build_norm
from megatron.model.blocks.position import Rotary
from megatron.model.interface.key_value_cache import CachedText
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate, check_divisible
from megatron.parallel.tensor.collectives import copy_to, gather_sequence
from megatron.parallel.tensor.direct_module import DirectModule
from megatron.parallel.tensor.layers import ColumnParallelLinear
from megatron.parallel.tensor.linear import deferrable_linear
from megatron.parallel.tensor.weight_gradients import WeightGradientQueue


class LatentProjection(nn.Module):
    """`y = x W^T + b`, replicated over the tensor-parallel ranks; with sequence parallelism each rank projects its own
    tokens, so that gradients are summed over the ranks.

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
        self.weight = annotate(nn.Parameter(torch.zeros(spec.local_shape, device=mesh.device)), spec)
        self.bias: nn.Parameter | None = None
        if config.add_qkv_bias:
            vector = ShardSpec.vector(output_size, partial=partial)
            self.bias = annotate(nn.Parameter(torch.zeros(output_size, device=mesh.device)), vector)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return deferrable_linear(x, self.weight, self.bias, self.queue)


class LatentHeads:
    """Heads whose keys and values are projected from a latent of `kv_lora_rank` channels per token; optionally queries
    from a latent of their own, too.

    Of a head's channels, `qk_head_dim` have no positions and `qk_pos_emb_head_dim` are rotated. All heads share one
    rotated key, projected from the hidden states. The latents are replicated over the tensor-parallel ranks, or with
    sequence parallelism hold each rank's tokens; the projections out of them are split by heads.

    Values are padded with zeros to the width of the keys, as every form of attention requires; `LatentAttention`
    removes the padding from the result.

    Attributes:
        parts: see `HeadProjection`.
        plain_size, rotary_size, value_size, latent_size: channels of a head's queries and keys without and with
            positions, of its values, and of a latent.

    Raises:
        ConfigError: the number of heads is not divisible by the tensor-parallel size.

    Source: DeepSeek-AI, "DeepSeek-V2", 2024, section 2.1 and appendix C; names of the projections: NVIDIA Megatron-LM
    `megatron/core/transformer/multi_latent_attention.py`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int) -> None:
        heads = Dimension("attention heads", config.num_attention_heads, mesh.tp)
        check_divisible(heads.size, mesh.tp, f"attention heads (--num-attention-heads {heads.size})")
        self.tp, self.head_size, self.latent_size = mesh.tp, config.kv_channels, config.kv_lora_rank
        self.plain_size, self.rotary_size = config.qk_head_dim, config.qk_pos_emb_head_dim
        self.value_size, self.padding = config.v_head_dim, config.kv_channels - config.v_head_dim
        self.rotary = Rotary(config, layer, mesh.kernels.rotary)

        def by_heads(input_size: int, channels: int) -> ColumnParallelLinear:
            outputs = (heads, Dimension("channels of a head", channels))
            return ColumnParallelLinear(input_size, outputs, mesh.tp, bias=False, device=mesh.device)

        self.query_norm = _built_norm(config, mesh, config.q_lora_rank)
        self.latent_norm = _built_norm(config, mesh, config.kv_lora_rank)
        self.query_down: LatentProjection | None = None
        if config.q_lora_rank is None:
            self.query_up = by_heads(config.hidden_size, config.kv_channels)
            of_queries: dict[str, nn.Module] = {"linear_q_proj": self.query_up}
        else:
            self.query_down = LatentProjection(config.q_lora_rank, config, mesh)
            self.query_up = by_heads(config.q_lora_rank, config.kv_channels)
            of_queries = {"linear_q_down_proj": self.query_down, "linear_q_up_proj": self.query_up}
        self.down = LatentProjection(config.latent_width, config, mesh)
        self.up = by_heads(config.kv_lora_rank, config.qk_head_dim + config.v_head_dim)
        self.up.divides_weight = True
        self.parts: dict[str, nn.Module] = {
            "q_layernorm": self.query_norm,
            "kv_layernorm": self.latent_norm,
            **of_queries,
            "linear_kv_down_proj": self.down,
            "linear_kv_up_proj": self.up,
        }

    def project(self, hidden: torch.Tensor, context: StepContext) -> tuple[Heads, torch.Tensor | None]:
        """Returns queries, keys and values, without gates; with a cache queries, cache entries and empty values.

        Shapes: `[b, s/t, h]` or `[b * s, h]` to three of `[b, a/t, s, d]`; with a cache to `[b, a/t, s, d]`,
            `[b, 1, s, c]` and `[b, 1, s, 0]`, c the width of an entry.
        """
        hidden, is_split = context.by_sample(hidden), context.splits_sequence
        latent = hidden if self.query_down is None else self.query_norm(self.query_down(hidden))
        query = self.query_up(latent, splits_sequence=is_split)  # [b, s, a/t * d]
        query = query.unflatten(-1, (-1, self.head_size)).transpose(1, 2)
        latent, shared = self.down(hidden).split([self.latent_size, self.rotary_size], dim=-1)
        latent = self.latent_norm(latent)  # [b, s/t, kv_lora_rank]
        shared = gather_sequence(shared, self.tp) if is_split else copy_to(shared, self.tp)
        plain, rotary = query.split([self.plain_size, self.rotary_size], dim=-1)
        rotary, shared = self.rotary.rotate(rotary, shared.unsqueeze(1), context)  # [b, 1, s, qk_pos_emb_head_dim]
        query = torch.cat((plain, rotary), dim=-1)
        if context.caches is not None:
            kept = torch.cat((latent.unsqueeze(1), shared), dim=-1)
            return (query, kept, kept[..., :0]), None
        return (query, *self.expanded(latent, shared, is_split)), None

    def expanded(
        self, latent: torch.Tensor, shared: torch.Tensor, is_split: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and padded values. Shapes: `[b, s/t, kv_lora_rank]` and `[b, 1, s, r]` to two of `[b, a/t, s, d]`."""
        expanded = self.up(latent, splits_sequence=is_split)
        expanded = expanded.unflatten(-1, (-1, self.plain_size + self.value_size)).transpose(1, 2)
        key, value = expanded.split([self.plain_size, self.value_size], dim=-1)
        key = torch.cat((key, shared.expand(-1, key.shape[1], -1, -1)), dim=-1)
        return key, F.pad(value, (0, self.padding)) if self.padding else value

    def halves(self) -> Sequence[torch.Tensor]:
        """The matrices from a latent to keys and to values. Shapes: `[a/t, qk_head_dim, kv_lora_rank]` each."""
        weight = self.up.weight.unflatten(0, (-1, self.plain_size + self.value_size))
        return weight.split([self.plain_size, self.value_size], dim=1)


class LatentAttention(DirectModule):
    """Another form of attention, whose result is freed of the padding of the values."""

    def __init__(self, form: AttentionForm, value_size: int) -> None:
        super().__init__()
        self.form, self.value_size = form, value_size

    def attend(self, heads: Heads, context: StepContext) -> torch.Tensor:
        """Shapes: query, key and value `[b, a/t, s, d]`; result `[b, a/t, s, v_head_dim]`."""
        return self.form.attend(heads, context)[..., : self.value_size]


class CachedLatentAttention(CachedAttention):
    """Attention to a cache that holds the latent and the rotated key of a token, and no values.

    For many queries, as in a prompt, keys and values are expanded again. Few queries are instead multiplied by the
    keys' half of the projection, and the results by the values' half: they attend to one head as wide as the cache
    entries, and nothing is computed for earlier tokens.
    """

    def __init__(self, scoring: Scoring, latent: LatentHeads) -> None:
        super().__init__(scoring)
        self.latent = latent

    def attend_text(self, query: torch.Tensor, text: CachedText, context: StepContext) -> torch.Tensor:
        """Attention to one text. Shapes: query `[b, a/t, s, d]`; result `[b, a/t, s, v_head_dim]`."""
        heads = self.latent
        if self.expands(query.shape[2], text.keys.shape[2]):
            latent, shared = text.keys.split([heads.latent_size, heads.rotary_size], dim=-1)
            keys, values = heads.expanded(latent.squeeze(1), shared)
            return super().attend_text(query, text._replace(keys=keys, values=values), context)[..., : heads.value_size]
        plain, rotary = query.split([heads.plain_size, heads.rotary_size], dim=-1)
        to_keys, to_values = heads.halves()
        query = torch.cat((plain @ to_keys, rotary), dim=-1)  # [b, a/t, s, c]
        attended = super().attend_text(query, text._replace(values=text.keys), context)
        return attended[..., : heads.latent_size] @ to_values.transpose(1, 2)

    def expands(self, queries: int, keys: int) -> bool:
        """True if expanding keys and values takes fewer operations than attending to latents, which are wider."""
        heads = self.latent
        per_key = heads.latent_size * (heads.plain_size + heads.value_size)
        per_pair = 2 * heads.latent_size - heads.plain_size - heads.value_size
        return queries * (keys * per_pair + per_key) >= keys * per_key


def _built_norm(config: ModelConfig, mesh: ParallelMesh, size: int | None) -> nn.Module:
    """The norm of a latent, or the identity."""
    if size is None or not config.qk_layernorm:
        return nn.Identity()
    return build_norm(config, mesh, size, partial=mesh.sequence_parallel, epsilon=config.latent_layernorm_epsilon)
