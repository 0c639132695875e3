"""One transformer block: attention and feed-forward, each with norms, dropout and a residual."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.config import ModelConfig
from megatron.config.architecture.norms import POST, POST_BRANCH, PRE
from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import dropout_add
from megatron.model.blocks.attention import SelfAttention
from megatron.model.blocks.dropout import EMBEDDING_SITE, DropoutSite, dropout_at
from megatron.model.blocks.experts import Experts
from megatron.model.blocks.feed_forward import FeedForward
from megatron.model.blocks.norm import NoNorm, build_hidden_norm
from megatron.model.interface.residual_sum import ResidualSum, as_sum, total
from megatron.model.interface.step_context import Recompute, StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.tensor.collectives import gather_from, scatter_to
from megatron.parallel.tensor.layers import RowParallelLinear
from megatron.parallel.tensor.norms import LayerNorm, RMSNorm


class _Branch(NamedTuple):
    """One of the two branches of a block.

    Attributes:
        inner_norm: norm of the input.
        layer: attention or feed-forward.
        outer_norm: norm of the output before the residual addition, if any.
        site: dropout site.
        bias_joins: True if the bias is added together with dropout and the residual.
        last: the last product, if the compiled norm of the sum with the residual can add its bias.
    """

    inner_norm: LayerNorm | RMSNorm | NoNorm
    layer: nn.Module
    outer_norm: nn.Module | None
    site: DropoutSite
    bias_joins: bool
    last: RowParallelLinear | None


class TransformerBlock(nn.Module):
    """Block `index` of the network.

    With `--checkpoint-activations` only the block's input is kept, and each block is recomputed during backward. No
    random state needs saving, because dropout masks are functions of (seed, layer, sample, position). With
    `--distribute-saved-activations` each tensor-parallel rank keeps its share of the input, which is gathered twice, in
    forward and for the recomputation.

    The outer norms follow attention and feed-forward, or with `--norm-placement post` the residual additions.

    Shapes: `[b, s, h]` to the same; with sequence parallelism this rank's tokens, `[b, s/t, h]`.

    Attributes:
        leaves_sum: True if it can leave its last addition to the next layer's norm.
        takes_sum: True if its first norm can do the last addition of the layer before it.
    """

    leaves_sum = True

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, index: int) -> None:
        super().__init__()
        placement = config.norm_placement
        self.tp = mesh.tp
        self.dropout, self.multiplier = config.hidden_dropout, config.residual_multiplier
        self.dropout_kernel = mesh.kernels.dropout_add
        self.is_parallel = config.parallel_residual
        self.residual_after_norm = config.apply_residual_connection_post_layernorm
        self.attention_site = DropoutSite(EMBEDDING_SITE + 1 + 2 * index)
        self.feed_forward_site = DropoutSite(EMBEDDING_SITE + 2 + 2 * index)
        self.norms_residual = placement == POST
        has_inner, has_outer = placement not in (POST_BRANCH, POST), placement != PRE
        self.takes_sum = has_inner
        self.adds_in_norm = placement != POST_BRANCH and self.multiplier == 1
        self.input_layernorm = build_hidden_norm(config, mesh) if has_inner else NoNorm()
        self.self_attention = SelfAttention(config, mesh, index)
        self.post_self_attn_layernorm = build_hidden_norm(config, mesh) if has_outer else NoNorm()
        self.pre_mlp_layernorm = build_hidden_norm(config, mesh) if has_inner else NoNorm()
        self.mlp = Experts(config, mesh, index) if config.has_experts(index) else FeedForward(config, mesh)
        self.post_mlp_layernorm = build_hidden_norm(config, mesh) if has_outer else NoNorm()
        # With nothing between a branch and its residual, the compiled operation adds the branch's bias, too.
        meets = not has_outer or self.norms_residual
        joins = mesh.kernels.dropout_add is Implementation.CSRC and meets
        is_normed = mesh.kernels.norm is Implementation.CSRC and meets and self.adds_in_norm
        projection = self.self_attention.linear_proj if config.attention_output_bias else None
        fc2 = self.mlp.linear_fc2 if config.mlp_bias and isinstance(self.mlp, FeedForward) else None
        self._program: Callable[[torch.Tensor, StepContext], torch.Tensor] | None = None
        norms = (self.post_self_attn_layernorm, self.post_mlp_layernorm)
        before_residual = norms if has_outer and not self.norms_residual else (None, None)
        self._attention = _Branch(
            self.input_layernorm,
            self.self_attention,
            before_residual[0],
            self.attention_site,
            joins and projection is not None,
            projection if is_normed and not self.is_parallel else None,
        )
        self._feed_forward = _Branch(
            self.pre_mlp_layernorm,
            self.mlp,
            before_residual[1],
            self.feed_forward_site,
            joins and fc2 is not None,
            fc2 if is_normed else None,
        )

    def forward(
        self, hidden: torch.Tensor | ResidualSum, context: StepContext, *, leaves_sum: bool = False
    ) -> torch.Tensor | ResidualSum:
        """Runs the block, with recomputation in backward if the context requires it.

        Args:
            leaves_sum: return the last residual addition uncomputed, if possible.
        """
        inputs = as_sum(hidden, context)
        result: ResidualSum
        if self._program is not None and self.training:  # not for scoring and generation, whose lengths vary
            self.self_attention.prepare(inputs[0], context)
            result = self._as_one(self._program, total(*inputs), context), None, None
        elif context.recompute is not Recompute.NONE and self._recomputes(context):
            result = self._as_one(self._run, total(*inputs), context), None, None
        else:
            result = self._run_sum(*inputs, context, is_normed=leaves_sum)
        return result if leaves_sum else context.by_sample(total(*result))

    def _recomputes(self, context: StepContext) -> bool:
        is_enabled = context.recompute in (Recompute.BLOCKS, Recompute.SPLIT_BLOCKS)
        return is_enabled and self.training and torch.is_grad_enabled()

    def _as_one(
        self, run: Callable[[torch.Tensor, StepContext], torch.Tensor], hidden: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        """Calls `_run` or its compiled program, recomputed in backward if the context requires it."""
        if not self._recomputes(context):
            return run(hidden, context)
        if context.recompute is Recompute.BLOCKS:
            return checkpoint(run, hidden, context, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

        def run_gathered(part: torch.Tensor) -> torch.Tensor:
            return run(gather_from(part, self.tp), context)

        part = scatter_to(hidden, self.tp)
        return checkpoint(run_gathered, part, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def compile_for(self, seed: int, device: torch.device, backend: str = "inductor") -> None:
        """Compiles the block for training with torch.compile, at its first use with each shape.

        Blocks that differ only in their weights share a program.

        Args:
            seed: seed of dropout.
        """
        for site in (self.attention_site, self.feed_forward_site, self.self_attention.scoring.site):
            site.hold_keys(seed, device)
        self._program = torch.compile(self._run, fullgraph=True, dynamic=False, backend=backend)

    def _run(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        return total(*self._run_sum(hidden, None, None, context))

    def _run_sum(
        self,
        branch: torch.Tensor,
        residual: torch.Tensor | None,
        bias: torch.Tensor | None,
        context: StepContext,
        *,
        is_normed: bool = False,
    ) -> ResidualSum:
        """Runs the block.

        Args:
            is_normed: True if a norm consumes the resulting sum.
        """
        attention, feed_forward = self._attention, self._feed_forward
        if self.norms_residual:
            hidden = total(branch, residual, bias)
            _, hidden = self.post_self_attn_layernorm.add(*self._sum(attention, hidden, hidden, context))
            _, hidden = self.post_mlp_layernorm.add(*self._sum(feed_forward, hidden, hidden, context))
            return hidden, None, None
        hidden, inputs = attention.inner_norm.add(branch, residual, bias)
        attended = self._sum(attention, inputs if self.residual_after_norm else hidden, inputs, context)
        if self.is_parallel:
            after_attention, inputs = total(*attended), feed_forward.inner_norm(hidden)
        else:
            after_attention, inputs = feed_forward.inner_norm.add(*attended)
        residual = inputs if self.residual_after_norm else after_attention
        return self._sum(feed_forward, residual, inputs, context, is_normed=is_normed)

    def _sum(
        self,
        branch: _Branch,
        residual: torch.Tensor,
        inputs: torch.Tensor,
        context: StepContext,
        *,
        is_normed: bool = True,
    ) -> ResidualSum:
        """Runs a branch; returns its output with the residual."""
        drops = self.training and self.dropout > 0
        if branch.bias_joins and drops:
            return branch.layer(inputs, context, partial(self._add, residual, branch.site, context)), None, None
        if branch.last is not None and is_normed and not drops and context.holds_parameters:
            return branch.layer(inputs, context, _without_bias), residual, branch.last.bias
        output = branch.layer(inputs, context)
        if branch.outer_norm is not None:
            output = branch.outer_norm(output)
        if drops or not self.adds_in_norm:
            return self._add(residual, branch.site, context, output), None, None
        return output, residual, None

    def _add(
        self,
        residual: torch.Tensor,
        site: DropoutSite,
        context: StepContext,
        branch: torch.Tensor,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """The residual plus a branch's output and bias after dropout, times the multiplier."""
        return dropout_add(
            branch,
            dropout_at(site, self.dropout, branch, context) if self.training else None,
            bias=bias,
            residual=residual,
            multiplier=self.multiplier,
            implementation=self.dropout_kernel,
        )


def _without_bias(product: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return product
