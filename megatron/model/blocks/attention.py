"""Self-attention with heads split over the tensor-parallel axis."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.config.architecture.attention import LEARNABLE
from megatron.model.blocks.attention_forms.cached import CachedAttention
from megatron.model.blocks.attention_forms.form import AttentionForm, HeadProjection, Scoring
from megatron.model.blocks.attention_forms.latent import CachedLatentAttention, LatentAttention, LatentHeads
from megatron.model.blocks.attention_forms.shared import SharedAttention
from megatron.model.blocks.attention_forms.whole import WholeAttention, score_bias
from megatron.model.blocks.query_key_value import FusedHeads
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate
from megatron.parallel.tensor.direct_module import DirectModule
from megatron.parallel.tensor.layers import Finish, RowParallelLinear


class SelfAttention(DirectModule):
    """Self-attention: multi-head, grouped-query, multi-query or latent; causal, or bidirectional in an encoder.

    Shapes: `[b, s, h]` or `[b * s, h]` to the same, replicated over the axis, or with sequence parallelism
        `[b, s/t, h]`; inside `[b, a/t, s, d]`.

    Args:
        layer: index of the block.

    Attributes:
        heads: projects hidden states to queries, keys and values; its modules are registered here.
        form: the form of attention.
        cached_form: the form of attention with key-value caches, in generation.

    Raises:
        ConfigError: the number of heads is not divisible by the tensor-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int) -> None:
        super().__init__()
        self.config = config
        self.heads: HeadProjection
        self.form: AttentionForm
        self.cached_form: AttentionForm
        self.dimension = Dimension("attention heads", config.num_attention_heads, mesh.tp)
        self.softmax_offset: nn.Parameter | None = None
        if config.softmax_type == LEARNABLE:
            spec = ShardSpec((self.dimension,))
            self.softmax_offset = annotate(nn.Parameter(torch.zeros(spec.local_shape, device=mesh.device)), spec)
        self.scoring = scoring = Scoring(config, mesh, layer, self.softmax_offset)
        self.form = WholeAttention(scoring)
        if mesh.cp.size * mesh.sp.size > 1:
            exchanged = Scoring(config, mesh, layer, self.softmax_offset, mesh.sp)
            self.form = SharedAttention(scoring, exchanged, mesh.cp)
        if config.multi_latent_attention:
            self.heads = latent = LatentHeads(config, mesh, layer)
            self.form = LatentAttention(self.form, latent.value_size) if latent.padding else self.form
            self.cached_form = CachedLatentAttention(scoring, latent)
        else:
            self.heads, self.cached_form = FusedHeads(config, mesh, layer), CachedAttention(scoring)
        for name, part in self.heads.parts.items():
            setattr(self, name, part)
        self.linear_proj = RowParallelLinear(
            config.num_attention_heads * config.value_channels,
            config.hidden_size,
            mesh.tp,
            bias=config.attention_output_bias,
            partial=mesh.sequence_parallel,
            device=mesh.device,
        )

    def forward(self, hidden: torch.Tensor, context: StepContext, finish: Finish | None = None) -> torch.Tensor:
        """Applies attention; with `finish`, returns `finish(product, bias)` of the last layer."""
        heads, gate = self.heads.project(hidden, context)
        form = self.form if context.caches is None else self.cached_form
        attended = form.attend(heads, context)  # [b, a/t, s, d]
        joined = _joined(attended, gate, hidden.dim())
        return self.linear_proj(joined, finish, splits_sequence=context.splits_sequence)  # type: ignore[no-any-return]

    def prepare(self, hidden: torch.Tensor, context: StepContext) -> None:
        """Computes the tensors of a micro-batch that layers share; a compiled program can only read them.

        Shapes: hidden `[b, s/t, h]` or `[b * s, h]`.
        """
        batch = context.sample_ids.shape[0]
        length = hidden.shape[:-1].numel() // batch * context.sequence_parallel.size
        if self.heads.rotary is not None:
            self.heads.rotary.angles(context, length)
        shape = (batch, self.dimension.local_size, length, self.config.kv_channels)
        score_bias(context, hidden.new_empty(()).expand(shape), self.scoring)  # for its shape, dtype and device


def _joined(attended: torch.Tensor, gate: torch.Tensor | None, dimensions: int) -> torch.Tensor:
    """Concatenates the outputs of the heads, multiplied by the sigmoid of the gate, if any.

    Shapes: attended `[b, a/t, s, d]`, gate `[b, s, a/t, d]`; result `[b, s, a/t * d]`, or in two dimensions
        `[b * s, a/t * d]`.

    Source: Qiu et al., "Gated attention for large language models", 2025, section 2.2 (G1, elementwise); Qwen3-Next.
    """
    joined = attended.transpose(1, 2)
    joined = joined if gate is None else joined * gate.sigmoid()
    return joined.flatten(2) if dimensions == 3 else joined.reshape(-1, joined.shape[2] * joined.shape[3])
