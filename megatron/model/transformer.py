"""One pre-LN transformer block: attention and feed-forward, each with dropout and a residual."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron import kernels
from megatron.config import ModelConfig
from megatron.model.attention import KeyValueCache, SelfAttention
from megatron.parallel.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.rng import hidden_dropout

EMBEDDING_DROPOUT = 0  # the layer slots of hidden dropout: the embedding's, then two a block


class FeedForward(nn.Module):
    """`fc2(gelu(fc1(x)))`, the inner dimension split over the tensor axis.

    The tanh form of GELU is the default, as in Megatron's fused kernel and in GPT-2; `--no-bias-gelu-fusion` takes the
    exact one unless `--openai-gelu` asks for the tanh form by name.

    Shapes: `[b, s, h]` to the same; inside `[b, s, f/t]`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.tanh_form = config.bias_gelu_fusion or config.openai_gelu
        inner = config.ffn_hidden_size
        self.linear_fc1 = ColumnParallelLinear(config.hidden_size, inner, mesh.tp, device=mesh.device)
        self.linear_fc2 = RowParallelLinear(inner, config.hidden_size, mesh.tp, device=mesh.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the layer."""
        return self.linear_fc2(kernels.gelu(self.linear_fc1(hidden), self.tanh_form))


class TransformerBlock(nn.Module):
    """Block `index` of the network, from one tuple to the next.

    With `--checkpoint-activations` only its input is kept, and the block runs again during backward. It needs no saved
    random state, because dropout is a function of what it drops. One block is one unit: `--checkpoint-num-layers` above
    1 would only be coarser.

    Shapes: `(hidden [b, s, h], sample_ids [b][, segment_ids [b, s]])` to the same.
    """

    def __init__(
        self,
        config: ModelConfig,
        mesh: ParallelMesh,
        index: int,
        *,
        seed: int,
        separate_segments: bool = False,
        recompute: bool = False,
        recompute_attention: bool = False,
    ) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.seed, self.dropout = seed, config.hidden_dropout
        self.attention_slot, self.feed_forward_slot = 1 + 2 * index, 2 + 2 * index
        self.recompute = recompute
        self.input_layernorm = LayerNorm(size, eps, device=mesh.device)
        self.self_attention = SelfAttention(
            config, mesh, index, seed=seed, separate_segments=separate_segments, recompute=recompute_attention
        )
        self.pre_mlp_layernorm = LayerNorm(size, eps, device=mesh.device)
        self.mlp = FeedForward(config, mesh)

    def forward(self, inputs: tuple[torch.Tensor, ...], cache: KeyValueCache | None = None) -> tuple[torch.Tensor, ...]:
        """Runs the block, recomputing in backward if asked to."""
        hidden, sample_ids, *rest = inputs
        segment_ids = rest[0] if rest else None
        if self.recompute and self.training and torch.is_grad_enabled():
            hidden = checkpoint(
                self._run, hidden, sample_ids, segment_ids, use_reentrant=False, preserve_rng_state=False
            )
        else:
            hidden = self._run(hidden, sample_ids, segment_ids, cache)
        return (hidden, sample_ids, *rest)

    def _run(
        self,
        hidden: torch.Tensor,
        sample_ids: torch.Tensor,
        segment_ids: torch.Tensor | None,
        cache: KeyValueCache | None = None,
    ) -> torch.Tensor:
        attended = self.self_attention(self.input_layernorm(hidden), sample_ids, segment_ids, cache)
        hidden = hidden + self._drop(attended, self.attention_slot, sample_ids)
        fed = self.mlp(self.pre_mlp_layernorm(hidden))
        return hidden + self._drop(fed, self.feed_forward_slot, sample_ids)

    def _drop(self, x: torch.Tensor, slot: int, sample_ids: torch.Tensor) -> torch.Tensor:
        return hidden_dropout(
            x, self.dropout, seed=self.seed, layer=slot, sample_ids=sample_ids, training=self.training
        )
