"""Self-attention with heads split over the tensor-parallel axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.config.architecture.attention import LEARNABLE, VANILLA
from megatron.config.architecture.positions import ALIBI
from megatron.errors import ConfigError
from megatron.kernels.attention.bounded import AttentionPlan
from megatron.kernels.attention.dense import attention, explicit_attention
from megatron.kernels.attention.partial import PartialAttention
from megatron.kernels.attention.sinks import sink_attention
from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import Dropout
from megatron.kernels.rotary import rotate_both, rotate_few, split_rotated
from megatron.model.blocks.dropout import DropoutSite
from megatron.model.blocks.norm import build_head_norm
from megatron.model.blocks.position import alibi_slopes, rotation, whole_rotation
from megatron.model.blocks.query_key_value import QueryKeyValue
from megatron.model.blocks.score_bias import bounded_plan, cached_bias, ring_plan, score_bias, visible_keys
from megatron.model.interface.key_value_cache import CachedText
from megatron.model.interface.step_context import Recompute, StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.rng import attention_dropout, attention_keys, attention_seed, seeded
from megatron.parallel.sequence.tiles import Visibility
from megatron.parallel.sequence.ulysses import to_heads, to_positions
from megatron.parallel.shard_spec import Dimension, ShardSpec, place
from megatron.parallel.tensor.direct_module import DirectModule
from megatron.parallel.tensor.layers import Finish, RowParallelLinear


class SelfAttention(DirectModule):
    """Attention: multi-head, grouped-query or multi-query; causal, or in both directions in an encoder.

    Shapes: `[b, s, h]` or `[b * s, h]` to the same, replicated over the axis, or with sequence parallelism
        `[b, s/t, h]`; inside `[b, a/t, s, d]`.

    Args:
        layer: index of the block.

    Raises:
        ConfigError: the number of heads is not divisible by the tensor-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int) -> None:
        super().__init__()
        heads = config.num_attention_heads
        self.query_dimension = Dimension("attention heads", heads, mesh.tp)
        self.config, self.layer, self.tp_rank = config, layer, mesh.tp.rank
        self.dropout, self.softcap = config.attention_dropout, config.attention_logit_softcap
        self.site = DropoutSite(layer, attention_keys)
        self.kernels = mesh.kernels
        self.scale = config.softmax_scale or 1 / math.sqrt(config.kv_channels)
        self.bidirectional = config.bidirectional
        self.window, self.is_rotary = config.window_of(layer), config.is_rotary_layer(config.alike(layer))
        self.build_projections(config, mesh)
        self.slopes: tuple[float, ...] = ()
        if config.position_embedding_type == ALIBI:
            own = slice(*self.query_dimension.bounds)
            self.slopes = tuple(alibi_slopes(heads)[own])
        self.may_have_plan = self.window is not None or bool(self.slopes) or self.softcap is not None
        self.has_sinks = config.softmax_type != VANILLA
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == LEARNABLE:
            spec = ShardSpec((self.query_dimension,))
            self.softmax_offset = place(nn.Parameter(torch.zeros(spec.local_shape, device=mesh.device)), spec)
        self.linear_proj = RowParallelLinear(
            heads * config.value_channels,
            config.hidden_size,
            mesh.tp,
            bias=config.attention_output_bias,
            partial=mesh.sequence_parallel,
            device=mesh.device,
        )

    def build_projections(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        """Builds what `_heads` makes queries, keys and values with."""
        self.linear_qkv = qkv = QueryKeyValue(config, mesh)
        is_compiled, is_plain = self.kernels.rotary is Implementation.CSRC, not config.qk_layernorm
        self.splits_and_rotates = is_compiled and self.is_rotary and is_plain and qkv.is_split and not qkv.is_gated
        self.joins_gradients = is_compiled and not self.is_rotary and is_plain and qkv.joins_gradients
        if config.qk_layernorm:
            self.q_layernorm = build_head_norm(config, mesh, self.linear_qkv.query_dimension)
            self.k_layernorm = build_head_norm(config, mesh, self.linear_qkv.group_dimension)

    def forward(self, hidden: torch.Tensor, context: StepContext, finish: Finish | None = None) -> torch.Tensor:
        """Applies attention; with `finish`, returns `finish(product, bias)` of the last layer.

        Raises:
            ConfigError: documents are to be separated while a key-value cache is in use, or the network is
                bidirectional, so that later tokens would change cached keys and values.
        """
        query, key, value, gate = self._heads(hidden, context)  # [b, a/t, s, d], [b, g/t, s, d], [b, s, a/t, d]
        if context.caches is not None:
            if self.bidirectional:
                raise ConfigError(
                    "Generation with a key-value cache needs a causal network, and this one is bidirectional "
                    "(--bidirectional): every new token would change what the earlier ones are. Use a GPT checkpoint."
                )
            attended = self._attend_cached(query, context.caches.append(self.layer, key, value), context)
            return self._modules["linear_proj"](self._joined(attended, gate, hidden.dim()), finish)  # type: ignore[no-any-return]
        if context.split is None:
            attended = self._attend_whole(query, key, value, context)
        else:
            ulysses = context.split.ulysses
            query, key, value = to_heads(query, key, value, ulysses)  # [b, a/tu, s/r, d]
            if context.split.ring.size == 1:
                attended = self._attend_whole(query, key, value, context)
            else:
                attended = self._attend_ring(query, key, value, context)
            attended = to_positions(attended, ulysses)  # [b, a/t, s/ru, d]
        joined, is_split = self._joined(attended, gate, hidden.dim()), context.splits_sequence
        return self._modules["linear_proj"](joined, finish, splits_sequence=is_split)  # type: ignore[no-any-return]

    def _joined(self, attended: torch.Tensor, gate: torch.Tensor | None, dimensions: int) -> torch.Tensor:
        """What the heads return, side by side for the output matrix, multiplied by the sigmoid of the gate if there is
        one.

        Shapes: attended `[b, a/t, s, d]`, gate `[b, s, a/t, d]`; result `[b, s, a/t * d]`, or in two dimensions
            `[b * s, a/t * d]`.

        Source: Qiu et al., "Gated attention for large language models", 2025, section 2.2 (G1, elementwise);
        Qwen3-Next.
        """
        joined = attended.transpose(1, 2)
        joined = joined if gate is None else joined * gate.sigmoid()
        return joined.flatten(2) if dimensions == 3 else joined.reshape(-1, joined.shape[2] * joined.shape[3])

    def _attend_whole(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        """Attention between the tokens of whole samples.

        Shapes: query `[b, a/t, s, d]`, key and value `[b, g/t, s, d]`; result as query.
        """
        plan = bias = None
        if self.may_have_plan or context.bounds_attention:
            plan, bias = self._bounds(query, context)
        if context.recompute is Recompute.ATTENTION and self.training and torch.is_grad_enabled():
            return checkpoint(  # type: ignore[no-any-return]
                self._attend, query, key, value, plan, bias, context, use_reentrant=False, preserve_rng_state=False
            )
        return self._attend(query, key, value, plan, bias, context)

    def _bounds(self, query: torch.Tensor, context: StepContext) -> tuple[AttentionPlan | None, torch.Tensor | None]:
        """How attention is computed that is not plainly causal: by a plan, or else with a bias of the scores."""
        slopes = self._slopes(context)
        if not (self.has_sinks or (self.training and self.dropout) or torch.compiler.is_compiling()):
            plan = bounded_plan(context, query, self.window, slopes, self.softcap, bidirectional=self.bidirectional)
            if plan is not None:
                return plan, None
        return None, score_bias(context, query, self.window, slopes, bidirectional=self.bidirectional)

    def _attend_ring(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        """Attention of this rank's tokens to those of all ranks of the ring.

        Shapes: query `[b, a/tu, s/r, d]`, key and value `[b, g, s/r, d]`; result as query.
        """
        slopes, attention = self._slopes(context), self._partial(context)
        seen = Visibility(self.bidirectional, self.window, bool(slopes), attention.holds_scores(query))
        plan = ring_plan(context, query, attention, seen, slopes)
        return plan.attend(query, key, value, self._sinks(query, context))

    def _partial(self, context: StepContext) -> PartialAttention:
        """Attention to some keys, to be merged with that to others, or with the sinks."""
        return PartialAttention(self.scale, self.softcap, context.explicit_attention)

    def _sinks(self, query: torch.Tensor, context: StepContext) -> torch.Tensor | None:
        """The sinks of the heads that attention is computed for on this rank; None if it has none.

        Shapes: query `[b, a/tu, s, d]`; result `[a/tu]`.
        """
        if not self.has_sinks:
            return None
        if self.softmax_offset is None:
            return query.new_zeros(query.shape[1])
        if context.split is None:
            return self.softmax_offset
        ulysses = context.split.ulysses
        return self.softmax_offset.chunk(ulysses.size)[ulysses.rank]

    def _head_part(self, context: StepContext) -> int:
        """Which part of the heads attention is computed for on this rank."""
        return self.tp_rank if context.split is None else context.split.head_part(self.tp_rank)

    def _slopes(self, context: StepContext) -> tuple[float, ...]:
        """The slopes of the heads that attention is computed for on this rank."""
        return self.slopes if context.split is None else context.split.of_heads(self.slopes)

    def prepare(self, hidden: torch.Tensor, context: StepContext) -> None:
        """Computes what layers share of a micro-batch, which a compiled program only reads.

        Shapes: hidden `[b, s/t, h]` or `[b * s, h]`.
        """
        batch = context.sample_ids.shape[0]
        length = hidden.shape[:-1].numel() // batch * context.sequence_parallel.size
        if self.is_rotary:
            rotation(self.config, self.layer, context, length)
        heads, size = self.query_dimension.local_size, self.config.kv_channels
        query = hidden.new_empty(()).expand(batch, heads, length, size)  # for its shape, dtype and device
        score_bias(context, query, self.window, self.slopes, bidirectional=self.bidirectional)

    def _heads(
        self, hidden: torch.Tensor, context: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Queries, keys and values, with their positions if those are rotary, and the gates, if there are any.

        Shapes: `[b, s/t, h]` or `[b * s, h]` to `[b, a/t, s, d]`, twice `[b, g/t, s, d]`, and `[b, s, a/t, d]`.
        """
        qkv, batch, is_split = self._modules["linear_qkv"], context.sample_ids.shape[0], context.splits_sequence
        if self.splits_and_rotates and context.caches is None:  # whose few tokens are rotated in fewer operations
            joint = qkv.joint(hidden, batch, is_split)
            angles = rotation(self.config, self.layer, context, joint.shape[1])
            interleaved, implementation = self.config.rotary_interleaved, self.kernels.rotary
            return *split_rotated(joint, *angles, interleaved=interleaved, implementation=implementation), None
        if self.joins_gradients and self._joins_now(hidden):
            return *qkv.heads(hidden, batch, is_split), None
        query, key, value, gate = qkv.project(hidden, batch, is_split)  # [b, s, a/t, d], [b, s, g, d]
        if self.config.qk_layernorm:
            query, key = self.q_layernorm(query), self.k_layernorm(key)
        if not qkv.is_split:
            key, value = qkv.expanded(key), qkv.expanded(value)  # [b, s, g/t, d]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [b, a/t or g/t, s, d]
        if self.is_rotary:
            query, key = self._rotated(query, key, context)
        return query, key, value, gate

    def _joins_now(self, hidden: torch.Tensor) -> bool:
        """Whether the gradients of a projection without rotary positions are joined in one pass with its bias's.

        Not in half precision on a CPU, where torch's operations take two thirds of the time, nor where torch.compile
        traces.
        """
        is_faster = hidden.is_cuda or hidden.dtype is torch.float32
        return is_faster and torch.is_grad_enabled() and not torch.compiler.is_compiling()

    def _rotated(
        self, query: torch.Tensor, key: torch.Tensor, context: StepContext
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and keys, rotated by their positions. Shapes: `[b, a/t, s, d]` and `[b, g/t, s, d]` to the same."""
        length, interleaved = query.shape[2], self.config.rotary_interleaved
        if context.caches is not None and not torch.is_grad_enabled():
            whole = whole_rotation(self.config, self.layer, context, length)
            if whole is not None:
                rotated = rotate_few(torch.cat((query, key), dim=1), *whole)
                return rotated.split((query.shape[1], key.shape[1]), dim=1)  # type: ignore[return-value]
        angles = rotation(self.config, self.layer, context, length)
        return rotate_both(query, key, *angles, interleaved=interleaved, implementation=self.kernels.rotary)

    def _attend_cached(self, query: torch.Tensor, texts: Sequence[CachedText], context: StepContext) -> torch.Tensor:
        """Attention of new tokens to their texts, one call per text.

        Shapes: query `[b, a/t, s, d]`, the new tokens of the texts one after another along s; result as query.
        """
        queries = (query,) if len(texts) == 1 else query.split([text.queries for text in texts], dim=2)
        attended = []
        for own, text in zip(queries, texts, strict=True):
            key, value = (visible_keys(part, text.queries, self.window) for part in (text.keys, text.values))
            bias = cached_bias(context, own, key.shape[2], self.window, self.slopes, text.prefix)
            causal = bias is None and text.queries > 1
            sinks = self._sinks(own, context)
            if sinks is not None:
                attended.append(
                    sink_attention(own, key, value, sinks, self._partial(context), causal=causal, bias=bias)
                )
                continue
            bounds: dict[str, Any] = {"causal": causal, "softcap": self.softcap, "kernels": self.kernels}
            attended.append(attention(own, key, value, self.scale, bias=bias, **bounds))
        return attended[0] if len(attended) == 1 else torch.cat(attended, dim=2)

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        plan: AttentionPlan | None,
        bias: torch.Tensor | None,
        context: StepContext,
    ) -> torch.Tensor:
        """Computes scores, softmax and the weighted sum of values.

        Shapes: query `[b, a/t, s, d]`, key and value `[b, g/t, k, d]`.
        """
        if plan is not None:
            return plan.attend(query, key, value, self.scale)
        causal = bias is None and query.shape[2] > 1 and not self.bidirectional
        sinks = self._sinks(query, context) if self.has_sinks else None
        if sinks is not None:
            return sink_attention(query, key, value, sinks, self._partial(context), causal=causal, bias=bias)
        bounds: dict[str, Any] = {"bias": bias, "causal": causal, "softcap": self.softcap, "kernels": self.kernels}
        drops = self.training and self.dropout > 0
        if context.explicit_attention or (drops and not query.is_cuda):
            dropout = self._dropout(query, context) if drops else None
            return explicit_attention(query, key, value, self.scale, dropout=dropout, **bounds)
        if not drops:
            return attention(query, key, value, self.scale, **bounds)
        part = self._head_part(context)
        with seeded(attention_seed(context.seed, context.first_sample, self.layer, part), query.device):
            return attention(query, key, value, self.scale, dropout=self.dropout, **bounds)

    def _dropout(self, query: torch.Tensor, context: StepContext) -> Dropout | None:
        """The stateless dropout of the probabilities. Shapes: query `[b, a/t, s, d]`; rows `[b, a/t, s]`."""
        _, heads, queries, _ = query.shape
        return attention_dropout(
            self.dropout,
            keys=self.site.keys(context.seed),
            sample_ids=context.sample_ids.to(query.device),
            first_head=self._head_part(context) * heads,
            heads=heads,
            queries=queries,
        )
