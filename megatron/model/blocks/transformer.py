"""One transformer block: attention and feed-forward, each with norms, dropout and a residual."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.config.architecture.norms import POST, POST_BRANCH, PRE
from megatron.kernels.dropout_add import dropout_add
from megatron.model.blocks.attention import SelfAttention
from megatron.model.blocks.experts import Experts
from megatron.model.blocks.feed_forward import FeedForward
from megatron.model.blocks.norm import build_norm
from megatron.model.interface.step_context import Recompute, StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.rng import hidden_dropout

EMBEDDING_DROPOUT = 0  # dropout sites are numbered: 0 for the embedding, then two per block


class TransformerBlock(nn.Module):
    """Block `index` of the network.

    With `--checkpoint-activations` only the block's input is kept, and the block is recomputed during backward. No
    random state needs saving, because the dropout mask is a function of (seed, layer, sample, position). Each block is
    recomputed separately: a `--checkpoint-num-layers` above 1 would only make the units coarser.

    The outer norms follow attention and feed-forward, or with `--norm-placement post` the residual additions.

    Shapes: `[b, s, h]` to the same.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, index: int) -> None:
        super().__init__()
        size, placement = config.hidden_size, config.norm_placement
        self.dropout, self.multiplier = config.hidden_dropout, config.residual_multiplier
        self.dropout_kernel = mesh.kernels.dropout_add
        self.is_parallel = config.parallel_residual
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.attention_slot, self.feed_forward_slot = 1 + 2 * index, 2 + 2 * index
        self.norms_residual = placement == POST
        has_inner, has_outer = placement not in (POST_BRANCH, POST), placement != PRE
        self.adds_in_norm = placement != POST_BRANCH and self.multiplier == 1
        self.input_layernorm = build_norm(config, mesh, size) if has_inner else nn.Identity()
        self.self_attention = SelfAttention(config, mesh, index)
        self.post_self_attn_layernorm = build_norm(config, mesh, size) if has_outer else nn.Identity()
        self.pre_mlp_layernorm = build_norm(config, mesh, size) if has_inner else nn.Identity()
        self.mlp = Experts(config, mesh, index) if config.has_experts(index) else FeedForward(config, mesh)
        self.post_mlp_layernorm = build_norm(config, mesh, size) if has_outer else nn.Identity()

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Runs the block, with recomputation in backward if the context requires it."""
        if context.recompute is Recompute.BLOCKS and self.training and torch.is_grad_enabled():
            return checkpoint(self._run, hidden, context, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]
        return self._run(hidden, context)

    def _run(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        if self.norms_residual:
            attended = self.self_attention(hidden, context)
            hidden = self._added_and_normed(
                hidden, attended, self.attention_slot, context, self.post_self_attn_layernorm
            )[1]
            fed = self.mlp(hidden, context)
            return self._added_and_normed(hidden, fed, self.feed_forward_slot, context, self.post_mlp_layernorm)[1]
        normed = self.input_layernorm(hidden)
        attended = self.post_self_attn_layernorm(self.self_attention(normed, context))
        residual = normed if self.residual_after_norm else hidden
        if self.is_parallel:
            after_attention = self._added(residual, attended, self.attention_slot, context)
            normed = self.pre_mlp_layernorm(hidden)
        else:
            after_attention, normed = self._added_and_normed(
                residual, attended, self.attention_slot, context, self.pre_mlp_layernorm
            )
        fed = self.post_mlp_layernorm(self.mlp(normed, context))
        residual = normed if self.residual_after_norm else after_attention
        return self._added(residual, fed, self.feed_forward_slot, context)

    def _added_and_normed(
        self, residual: torch.Tensor, branch: torch.Tensor, slot: int, context: StepContext, norm: nn.Module
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of `_added`, and a norm of it: in one pass where nothing comes between residual and branch."""
        if self.adds_in_norm and not (self.training and self.dropout):
            return norm.add(branch, residual)  # type: ignore[no-any-return,operator]
        total = self._added(residual, branch, slot, context)
        return total, norm(total)

    def _added(self, residual: torch.Tensor, branch: torch.Tensor, slot: int, context: StepContext) -> torch.Tensor:
        """The residual plus a branch's output after dropout, times the multiplier."""
        dropout = None
        if self.training:
            dropout = hidden_dropout(
                self.dropout,
                seed=context.seed,
                layer=slot,
                sample_ids=context.sample_ids.to(branch.device),
                length=branch.shape[1],
                first_position=context.position_offset,
            )
        return dropout_add(
            branch, dropout, residual=residual, multiplier=self.multiplier, implementation=self.dropout_kernel
        )
