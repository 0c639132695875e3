"""One pre-LN transformer block: attention and feed-forward, each with dropout and a residual."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.kernels.activations import activation
from megatron.model.blocks.attention import SelfAttention
from megatron.model.interface.step_context import Recompute, StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.rng import hidden_dropout
from megatron.parallel.shard_spec import Dimension
from megatron.parallel.tensor.layers import ColumnParallelLinear, LayerNorm, RowParallelLinear

EMBEDDING_DROPOUT = 0  # dropout sites are numbered: 0 for the embedding, then two per block


class FeedForward(nn.Module):
    """`fc2(gelu(fc1(x)))`, the inner dimension split over the tensor-parallel axis.

    The tanh approximation of GELU is the default, as in Megatron's fused kernel and in GPT-2; `--no-bias-gelu-fusion`
    selects the exact form unless `--openai-gelu` is also given.

    Shapes: `[b, s, h]` to the same; inside `[b, s, f/t]`.

    Args:
        residual_std: standard deviation of the second matrix's initial weights.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, residual_std: float) -> None:
        super().__init__()
        self.activation = config.activation_function
        inner = Dimension("outputs of a linear layer", config.ffn_hidden_size, mesh.tp)
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size, (inner,), mesh.tp, init_std=config.init_method_std, device=mesh.device
        )
        self.linear_fc2 = RowParallelLinear(
            config.ffn_hidden_size, config.hidden_size, mesh.tp, init_std=residual_std, device=mesh.device
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Applies the layer."""
        return self.linear_fc2(activation(self.linear_fc1(hidden), self.activation))


class TransformerBlock(nn.Module):
    """Block `index` of the network.

    With `--checkpoint-activations` only the block's input is kept, and the block is recomputed during backward. No
    random state needs saving, because the dropout mask is a function of (seed, layer, sample, position). Each block is
    recomputed separately: a `--checkpoint-num-layers` above 1 would only make the units coarser.

    Shapes: `[b, s, h]` to the same.

    Args:
        residual_std: standard deviation of the initial weights of the two matrices that write to the residual stream.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, index: int, residual_std: float) -> None:
        super().__init__()
        size, eps = config.hidden_size, config.layernorm_epsilon
        self.dropout = config.hidden_dropout
        self.attention_slot, self.feed_forward_slot = 1 + 2 * index, 2 + 2 * index
        self.input_layernorm = LayerNorm(size, eps, device=mesh.device)
        self.self_attention = SelfAttention(config, mesh, index, residual_std)
        self.pre_mlp_layernorm = LayerNorm(size, eps, device=mesh.device)
        self.mlp = FeedForward(config, mesh, residual_std)

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Runs the block, with recomputation in backward if the context requires it."""
        if context.recompute is Recompute.BLOCKS and self.training and torch.is_grad_enabled():
            return checkpoint(self._run, hidden, context, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._run(hidden, context)

    def _run(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        attended = self.self_attention(self.input_layernorm(hidden), context)
        hidden = hidden + self._drop(attended, self.attention_slot, context)
        fed = self.mlp(self.pre_mlp_layernorm(hidden))
        return hidden + self._drop(fed, self.feed_forward_slot, context)

    def _drop(self, x: torch.Tensor, slot: int, context: StepContext) -> torch.Tensor:
        return hidden_dropout(
            x,
            self.dropout,
            seed=context.seed,
            layer=slot,
            sample_ids=context.sample_ids,
            training=self.training,
            first_position=context.position_offset,
        )
