"""Mixture of experts: a feed-forward layer of many small networks; each token passes through a few of them.

Tokens are sorted by expert and sent to the ranks of their experts (`parallel/expert`), each expert multiplies its rows,
and the results return to the tokens' order; nothing of size tokens x experts is stored besides the router's scores.
Every token reaches all the experts that it chose, unless experts have a capacity: each then has a fixed number of rows,
and rows without a token are ignored. The inner width of every expert is split over the tensor-parallel axis, unless
experts are whole. An expert without tokens has a zero gradient, not a missing one.
"""

from __future__ import annotations

import dataclasses

import torch
import torch.nn.functional as F
from torch import nn

from megatron.config import ModelConfig
from megatron.kernels.activations import activation, gated
from megatron.kernels.grouped import equal_groups_linear, grouped_linear
from megatron.kernels.products import linear
from megatron.model.blocks.capacity import ExpertCapacity
from megatron.model.blocks.feed_forward import FeedForward
from megatron.model.blocks.router import ExpertLoad, Router, RouterLosses
from megatron.model.interface.step_context import StepContext
from megatron.parallel.expert.dispatch import Dispatch
from megatron.parallel.expert.order import Slots
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate, check_divisible
from megatron.parallel.tensor.collectives import copy_to, gather_sequence, reduce_from, scatter_sequence


class Experts(nn.Module):
    """Routed experts, optionally with biases, a shared expert that sees every token, and a parallel dense layer.

    The shared expert computes while tokens are on their way to experts on other ranks.

    Shapes: `[b, s, h]` to the same, replicated over the tensor-parallel axis, or with sequence parallelism
        `[b, s/t, h]`: each rank routes its own tokens. They are gathered for experts that are split over the axis;
        for whole experts every rank sends its own tokens.

    Args:
        layer: index of the block.

    Raises:
        ConfigError: an expert's inner width is not divisible by the tensor-parallel size, or the number of experts by
            the expert-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int) -> None:
        super().__init__()
        self.tp, self.ep, self.count = mesh.tp, mesh.ep, config.experts_of(layer)
        self.are_split = mesh.experts.keeps_tensor
        self.router = Router(config, mesh, layer)
        self.capacity = ExpertCapacity(config, config.experts_of(layer))
        self.losses = RouterLosses(config, layer)
        inner, shared = config.moe_ffn_hidden_size, config.moe_shared_expert_intermediate_size
        check_divisible(inner, mesh.etp, f"channels of an expert (--moe-ffn-hidden-size {inner})")
        check_divisible(self.count, mesh.ep, f"experts (--num-experts {self.count})")
        self.experts = ExpertNetworks(config, mesh, inner, mesh.etp, self.count)
        self.shared_experts: ExpertNetworks | None = None
        if shared:
            flag = f"--moe-shared-expert-intermediate-size {shared}"
            check_divisible(shared, mesh.tp, f"channels of the shared expert ({flag})")
            self.shared_experts = ExpertNetworks(config, mesh, shared, mesh.tp)
        self.residual = ResidualMixture(config, mesh) if config.moe_residual else None

    def forward(self, hidden: torch.Tensor, context: StepContext) -> torch.Tensor:
        shape, is_split = hidden.shape, context.splits_sequence
        hidden = context.by_sample(hidden)
        routing = self.router(hidden, is_split)
        slots = self.capacity.slots(routing.weights, routing.experts, context, training=self.training)
        # Modules that are split over tensor-parallel ranks compute partial gradients of tokens and weights on each.
        if self.are_split or self.shared_experts is not None:
            whole = gather_sequence(hidden, self.tp) if is_split else copy_to(hidden, self.tp)
        tokens, experts, weights, local = whole if self.are_split else hidden, routing.experts, routing.weights, slots
        if is_split and not self.are_split:
            experts, weights = self._local(experts, len(hidden)), self._local(weights, len(hidden))
            local = None if slots is None else Slots(self._local(slots.indices, len(hidden)), slots.capacity)
        dispatch = Dispatch.of(experts, self.count, self.ep, local)
        weights = dispatch.order.kept_weights(weights)
        sent = dispatch.start(tokens.flatten(0, 1))
        shared = None if self.shared_experts is None else self.shared_experts(whole.flatten(0, 1))  # [n, h]
        rows, ends = dispatch.arrived(sent)
        rows = self.experts(rows, ends)
        if self.are_split:
            result = dispatch.combined(rows, copy_to(weights, self.tp))  # [n, h]
            result = self._summed(result if shared is None else result + shared, len(hidden), is_split)
        else:
            result = dispatch.combined(rows, weights).view_as(hidden)
            result = result if shared is None else result + self._summed(shared, len(hidden), is_split)
        if self.residual is not None:
            result = self.residual(hidden, result, context)
        if not self.training:
            return result.view(shape)
        counts = dispatch.order.counts if self.are_split else expert_counts(routing.experts, self.count)
        dropped = None if slots is None else expert_counts(routing.experts, self.count, ~slots.kept)
        load = ExpertLoad(counts, dropped, self.router.expert_shares)
        return self.losses.attach(result, routing, load, context.auxiliary, context.split).view(shape)

    def _local(self, choices: torch.Tensor, batch: int) -> torch.Tensor:
        """Selects the choices of this tensor-parallel rank's tokens. Shapes: `[n, k]` to `[n/t, k]`."""
        return choices.unflatten(0, (batch, self.tp.size, -1))[:, self.tp.rank].flatten(0, 1)

    def _summed(self, parts: torch.Tensor, batch: int, is_split: bool) -> torch.Tensor:
        """Sums the parts of the tensor-parallel ranks. Shapes: `[n, h]` to `[b, s, h]` or `[b, s/t, h]`."""
        parts = parts.unflatten(0, (batch, -1))
        return scatter_sequence(parts, self.tp) if is_split else reduce_from(parts, self.tp)


def expert_counts(experts: torch.Tensor, count: int, among: torch.Tensor | None = None) -> torch.Tensor:
    """Counts the tokens that chose each expert, without synchronizing.

    Args:
        among: mask of the choices to count; all by default.

    Shapes: experts `[n, k]` int64, among `[n, k]` bool; result `[e]` int64.
    """
    chosen = experts.flatten()
    each = torch.ones_like(chosen) if among is None else among.flatten().to(chosen)
    return chosen.new_zeros(count).scatter_add_(0, chosen, each)


class ResidualMixture(nn.Module):
    """Mixes the experts' result with a dense feed-forward layer: `c_0 experts(x) + c_1 dense(x)`, where `c` is the
    softmax of a linear layer of x, in float32 like the router.

    The linear layer is replicated over the tensor-parallel axis, whose ranks have equal inputs.

    Shapes: `[b, s, h]` to the same; weight `[2, h]`, bias `[2]`.

    Source: Rajbhandari et al., "DeepSpeed-MoE", 2022, section 4.1; DeepSpeed `moe/layer.py`, `MoE` with `use_residual`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        self.dense = FeedForward(config, mesh)
        self.coefficient = MixtureCoefficients(config, mesh)

    def forward(self, hidden: torch.Tensor, routed: torch.Tensor, context: StepContext) -> torch.Tensor:
        expert_weight, dense_weight = self.coefficient(hidden).unbind(dim=-1)  # [b, s] each
        dense = self.dense(hidden, context)
        total = routed * expert_weight.unsqueeze(-1) + dense * dense_weight.unsqueeze(-1)
        return total.to(hidden.dtype)


class MixtureCoefficients(nn.Module):
    """Two weights for every token that sum to 1, in float32.

    Shapes: `[b, s, h]` to `[b, s, 2]`; weight `[2, h]`, bias `[2]`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        super().__init__()
        parts, device, summed_over = Dimension("experts and dense layer", 2), mesh.device, (mesh.sequence_parallel,)
        matrix = ShardSpec((parts, Dimension("hidden", config.hidden_size)), is_matrix=True, summed_over=summed_over)
        self.weight = annotate(nn.Parameter(torch.zeros(matrix.local_shape, device=device)), matrix)
        self.bias = annotate(nn.Parameter(torch.zeros(2, device=device)), ShardSpec((parts,), summed_over=summed_over))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden.float(), self.weight.float(), self.bias.float()).softmax(dim=-1)


class ExpertNetworks(nn.Module):
    """One feed-forward network, or several of equal shape for sorted tokens; returns this rank's part of the sum.

    Shapes: x `[rows, h]` to the same; inside `[rows, f/t]`.

    Args:
        inner: inner width f.
        width_axis: the axis that the width is split over.
        count: number of networks, divided over the expert-parallel ranks; None for a single network, whose parameters
            lack this dimension.
    """

    def __init__(
        self, config: ModelConfig, mesh: ParallelMesh, inner: int, width_axis: Axis, count: int | None = None
    ) -> None:
        super().__init__()
        self.is_gated, self.function = config.gated_linear_unit, config.activation_function
        self.limit, self.offset = config.activation_func_clamp_value, config.glu_linear_offset
        self.implementation = mesh.kernels.activation
        hidden, width = Dimension("hidden", config.hidden_size), Dimension("inner", inner, width_axis)
        networks = () if count is None else (Dimension("experts", count, mesh.ep, parts=(1,) * count),)
        halves = (Dimension("gate and up", 2, parts=(1, 1)),) if self.is_gated else ()
        first = ShardSpec((*networks, *halves, width, hidden), is_matrix=True)
        second = ShardSpec((*networks, hidden, width), is_matrix=True)
        has_bias = config.moe_mlp_bias and bool(networks)
        self.linear_fc1 = ExpertMatrices(first, bool(networks), mesh.device, has_bias=has_bias)
        self.linear_fc2 = ExpertMatrices(second, bool(networks), mesh.device, has_bias=has_bias)

    def forward(self, x: torch.Tensor, ends: torch.Tensor | None = None) -> torch.Tensor:
        """Applies the networks.

        Shapes: ends `[e/p]`, one past the last row of every expert on this rank; None for a single network, or equal
            numbers of rows.
        """
        inner = self.linear_fc1(x, ends)
        if self.is_gated:
            pair = inner.unflatten(1, (2, -1))
            inner = gated(pair, self.function, limit=self.limit, offset=self.offset, implementation=self.implementation)
        else:
            inner = activation(inner, self.function, implementation=self.implementation)
        return self.linear_fc2(inner, ends)  # type: ignore[no-any-return]


class ExpertMatrices(nn.Module):
    """One matrix, or one per expert, optionally with a bias.

    If ranks share the input, each computes a part of the sum and adds its part of the bias.

    Shapes: weight `[output, input]` or `[e, output, input]`, bias `[e, output]`, where the input is split `[e,
        output/t]`, dimensions that belong to the output merged; x `[rows, input]` to `[rows, output]`.
    """

    def __init__(self, spec: ShardSpec, are_several: bool, device: torch.device, *, has_bias: bool) -> None:
        super().__init__()
        shape = (*spec.local_shape[:are_several], -1, spec.local_shape[-1])
        self.weight = annotate(nn.Parameter(torch.zeros(spec.local_shape, device=device).view(shape)), spec)
        self.bias: nn.Parameter | None = None
        self.padding = (0, 0)  # outputs before and after this rank's part of the bias
        if has_bias:
            *others, output, inputs = spec.dimensions
            if inputs.axis is not None:
                output = dataclasses.replace(output, axis=inputs.axis)
                self.padding = output.bounds[0], output.size - output.bounds[1]
            bias_spec = ShardSpec((*others, output))
            values = torch.zeros(bias_spec.local_shape, device=device)
            self.bias = annotate(nn.Parameter(values.view(values.shape[0], -1)), bias_spec)

    def forward(self, x: torch.Tensor, ends: torch.Tensor | None) -> torch.Tensor:
        bias = self.bias if self.bias is None or self.padding == (0, 0) else F.pad(self.bias, self.padding)
        if ends is not None:
            return grouped_linear(x, self.weight, ends, bias)
        return linear(x, self.weight) if self.weight.dim() == 2 else equal_groups_linear(x, self.weight, bias)
