"""Mixture of experts: a feed-forward layer of many small networks, of which each token passes through a few.

Dropless: every token reaches all the experts that it chose. Tokens are sorted by expert, each expert multiplies its
rows, and the results return to the tokens' order; nothing of size tokens x experts is stored besides the router's
scores. The inner width of every expert is split over the tensor-parallel axis. An expert without tokens has a zero
gradient, not a missing one.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from megatron.config import ModelConfig
from megatron.kernels.activations import activation, gated
from megatron.kernels.grouped import grouped_linear
from megatron.kernels.products import linear
from megatron.model.blocks.feed_forward import FeedForward
from megatron.model.blocks.router import Router, RouterLosses
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import Dimension, ShardSpec, check_divisible, place
from megatron.parallel.tensor.collectives import copy_to, gather_sequence, reduce_from, scatter_sequence


class Experts(nn.Module):
    """Routed experts, and optionally a shared one that sees every token, without biases; optionally mixed with a dense
    layer.

    Shapes: `[b, s, h]` to the same, replicated over the tensor-parallel axis, or with sequence parallelism
        `[b, s/t, h]`: tokens are routed where they are, and gathered for the experts, of which every rank has a part.

    Args:
        layer: index of the block.

    Raises:
        ConfigError: an expert's inner width is not divisible by the tensor-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int) -> None:
        super().__init__()
        self.tp = mesh.tp
        self.router = Router(config, mesh, layer)
        self.losses = RouterLosses(config, layer)
        inner, shared = config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size
        check_divisible(inner, mesh.tp, f"channels of an expert (--moe-ffn-hidden-size {inner})")
        self.experts = ExpertNetworks(config, mesh, inner, config.experts_of(layer))
        self.shared_experts: ExpertNetworks | None = None
        if shared:
            flag = f"--moe-shared-expert-intermediate-size {shared}"
            check_divisible(shared, mesh.tp, f"channels of the shared expert ({flag})")
            self.shared_experts = ExpertNetworks(config, mesh, shared)
        self.residual = ResidualMixture(config, mesh) if config.moe_residual else None

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Applies the layer."""
        is_split = context.splits_sequence
        routing = self.router(hidden, is_split)
        order = ExpertOrder.of(routing.experts, self.router.weight.shape[0])
        # Each rank holds part of every expert and so computes part of the gradients of the tokens and of the weights.
        tokens = gather_sequence(hidden, self.tp) if is_split else copy_to(hidden, self.tp)
        batch, weights = len(tokens), copy_to(routing.weights, self.tp)
        tokens = tokens.flatten(0, 1)  # [n, h]
        routed = self.experts(_Dispatch.apply(tokens, order), order.ends)  # [n*k, h]
        result = _Combine.apply(routed, weights, order)  # [n, h]
        if self.shared_experts is not None:
            result = result + self.shared_experts(tokens)
        result = result.unflatten(0, (batch, -1))
        result = scatter_sequence(result, self.tp) if is_split else reduce_from(result, self.tp)
        if self.residual is not None:
            result = self.residual(hidden, result, context)
        if not self.training:
            return result
        return self.losses.attach(result, routing, order.counts, context.auxiliary, context.split)


class ResidualMixture(nn.Module):
    """A dense feed-forward layer, mixed with what the experts computed: `c_0 experts(x) + c_1 dense(x)`, where `c` is
    the softmax of a linear layer of x, in float32 like the router.

    The linear layer is replicated over the tensor-parallel axis, whose ranks see equal inputs and equal sums.

    Shapes: `[b, s, h]` to the same; weight `[2, h]`, bias `[2]`.

    Source: Rajbhandari et al., "DeepSpeed-MoE", 2022, section 4.1; DeepSpeed `moe/layer.py`, `MoE` with `use_residual`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.dense = FeedForward(config, mesh)
        self.coefficient = MixtureCoefficients(config, mesh)

    def forward(self, hidden: torch.Tensor, routed: torch.Tensor, context: StepContext) -> torch.Tensor:
        """Adds the dense layer to the result of the experts."""
        of_experts, of_dense = self.coefficient(hidden).unbind(dim=-1)  # [b, s] each
        dense = self.dense(hidden, context)
        total = routed * of_experts.unsqueeze(-1) + dense * of_dense.unsqueeze(-1)
        return total.to(hidden.dtype)


class MixtureCoefficients(nn.Module):
    """Two weights for every token that sum to 1, in float32.

    Shapes: `[b, s, h]` to `[b, s, 2]`; weight `[2, h]`, bias `[2]`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        parts, device, summed_over = Dimension("experts and dense layer", 2), mesh.device, (mesh.sequence_parallel,)
        matrix = ShardSpec((parts, Dimension("hidden", config.hidden_size)), is_matrix=True, summed_over=summed_over)
        self.weight = place(nn.Parameter(torch.zeros(matrix.local_shape, device=device)), matrix)
        self.bias = place(nn.Parameter(torch.zeros(2, device=device)), ShardSpec((parts,), summed_over=summed_over))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Weighs the tokens."""
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()).softmax(dim=-1)


class ExpertNetworks(nn.Module):
    """One feed-forward network, or several of the same shape for sorted tokens; this rank's part of the sum.

    Shapes: x `[rows, h]` to the same; inside `[rows, f/t]`.

    Args:
        inner: inner width f.
        count: number of networks; None for one whose parameters have no dimension for it.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, inner: int, count: int | None = None) -> None:
        super().__init__()
        self.is_gated, self.function = config.gated_linear_unit, config.activation_function
        self.implementation = mesh.kernels.activation
        hidden, width = Dimension("hidden", config.hidden_size), Dimension("inner", inner, mesh.tp)
        # split over `mesh.ep` as well once tokens are exchanged between ranks
        networks = () if count is None else (Dimension("experts", count),)
        halves = (Dimension("gate and up", 2),) if self.is_gated else ()
        first = ShardSpec((*networks, *halves, width, hidden), is_matrix=True)
        second = ShardSpec((*networks, hidden, width), is_matrix=True)
        self.linear_fc1 = ExpertMatrices(first, count, mesh.device)
        self.linear_fc2 = ExpertMatrices(second, count, mesh.device)

    def forward(self, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Applies the networks.

        Shapes: ends `[e]`, one past the last row of every expert; None for a single network.
        """
        inner = self.linear_fc1(x, ends)
        if self.is_gated:
            inner = gated(inner.view(x.shape[0], 2, -1), self.function, implementation=self.implementation)
        else:
            inner = activation(inner, self.function, implementation=self.implementation)
        return self.linear_fc2(inner, ends)  # type: ignore[no-any-return]


class ExpertMatrices(nn.Module):
    """One matrix, or one per expert.

    Shapes: weight `[output, input]` or `[e, output, input]`, dimensions that belong to the output merged; x
        `[rows, input]` to `[rows, output]`.
    """

    def __init__(self, spec: ShardSpec, count: int | None, device: torch.device) -> None:
        super().__init__()
        networks = () if count is None else (count,)
        shape = (*networks, -1, spec.local_shape[-1])
        self.weight = place(nn.Parameter(torch.zeros(spec.local_shape, device=device).view(shape)), spec)

    def forward(self, x: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        """Multiplies every row by its matrix."""
        return linear(x, self.weight) if ends is None else grouped_linear(x, self.weight, ends)


@dataclass(frozen=True)
class ExpertOrder:
    """The (token, choice) pairs sorted by expert, and within an expert by token.

    Shapes: tokens `[n*k]` int64; positions `[n, k]` int64; ends `[e]` int64.

    Attributes:
        tokens: the token of every sorted row.
        positions: the sorted row of every pair.
        ends: one past the last row of every expert.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    ends: torch.Tensor

    @classmethod
    def of(cls, experts: torch.Tensor, count: int) -> ExpertOrder:
        """The order for the chosen experts, without synchronizing. Shapes: experts `[n, k]`."""
        ordered, pairs = experts.flatten().sort(stable=True)
        positions = torch.empty_like(pairs)
        positions[pairs] = torch.arange(pairs.numel(), device=pairs.device)
        ends = torch.searchsorted(ordered, torch.arange(count, device=pairs.device), right=True)
        return cls(pairs // experts.shape[1], positions.view(experts.shape), ends)

    @property
    def choices(self) -> tuple[torch.Tensor, ...]:
        """The sorted rows of the tokens' first choices, of their second choices, and so on. Shapes: `[n]` each."""
        return self.positions.unbind(dim=1)

    @property
    def counts(self) -> torch.Tensor:
        """How many tokens each expert gets. Shapes: `[e]`."""
        return self.ends.diff(prepend=self.ends.new_zeros(1))


class _Dispatch(torch.autograd.Function):
    """Copies every token to the rows of its experts: `[n, h]` to `[n*k, h]`.

    Backward gathers and adds in a fixed order, where the backward pass of an index would add atomically.
    """

    @staticmethod
    def forward(ctx, tokens, order):  # type: ignore[no-untyped-def]
        ctx.order = order
        return tokens.index_select(0, order.tokens)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        first, *others = ctx.order.choices
        total = gradient.index_select(0, first).float()
        for rows in others:
            total += gradient.index_select(0, rows)
        return total.to(gradient.dtype), None


class _Combine(torch.autograd.Function):
    """Adds up each token's rows with their weights, in float32: `[n*k, h]` and `[n, k]` to `[n, h]`."""

    @staticmethod
    def forward(ctx, rows, weights, order):  # type: ignore[no-untyped-def]
        ctx.save_for_backward(rows, weights)
        ctx.order = order
        (first, *others), (factor, *factors) = order.choices, weights.split(1, dim=1)
        total = rows.index_select(0, first) * factor
        for selected, factor in zip(others, factors, strict=True):
            total.addcmul_(rows.index_select(0, selected), factor)
        return total.to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        rows, weights = ctx.saved_tensors
        order = ctx.order
        of_rows = gradient.index_select(0, order.tokens)  # [n*k, h]
        products = (of_rows * rows).sum(dim=-1, dtype=weights.dtype)
        sorted_weights = torch.empty_like(products)
        sorted_weights[order.positions.flatten()] = weights.flatten()
        of_rows.mul_(sorted_weights.unsqueeze(1))
        return of_rows, products[order.positions], None
