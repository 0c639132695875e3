"""The fused projection to queries, keys and values, in groups of heads, and to gates."""

from __future__ import annotations

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.kernels.choice import Implementation
from megatron.kernels.rotary import split_heads, split_rotated
from megatron.model.blocks.attention_forms.form import Heads
from megatron.model.blocks.norm import build_head_norm
from megatron.model.blocks.position import Rotary
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import Dimension, check_divisible
from megatron.parallel.tensor.collectives import copy_to
from megatron.parallel.tensor.layers import ColumnParallelLinear
from megatron.parallel.tensor.linear import column_linear


class QueryKeyValue(ColumnParallelLinear):
    """Projects hidden states to this rank's query heads and to their keys and values; with `--attention-output-gate`
    also to as many gates as queries.

    The rows of the weight are ordered [groups, (queries of the group, their gates, key, value), head size], Megatron's
    order, so that a rank holds whole groups. If the tensor-parallel size does not divide the groups (multi-query
    attention), the weight is replicated: each rank computes its own queries and all keys and values, and the ranks'
    gradients are summed. With sequence parallelism the hidden states `[b, s/t, h]` of all ranks are gathered.

    Shapes: weight `[g/t, q + 2, d, h]` or `[g, q + 2, d, h]`, its first dimensions merged; q is a/g, doubled with
        gates.

    Raises:
        ConfigError: the number of heads is not divisible by the tensor-parallel size.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh) -> None:
        heads, groups = config.num_attention_heads, config.num_query_groups
        check_divisible(heads, mesh.tp, f"attention heads (--num-attention-heads {heads})")
        is_split = groups % mesh.tp.size == 0
        self.group_size, self.head_size, self.is_gated = (
            heads // groups,
            config.kv_channels,
            config.attention_output_gate,
        )
        queries = (self.group_size,) * (1 + self.is_gated)
        self.group_rows = sum(queries) + 2
        outputs = (
            Dimension("groups of attention heads", groups, mesh.tp if is_split else None),
            Dimension("queries, gates, key and value of a group", self.group_rows, parts=(*queries, 1, 1)),
            Dimension("head size", config.kv_channels),
        )
        super().__init__(
            config.hidden_size,
            outputs,
            mesh.tp,
            bias=config.add_qkv_bias,
            device=mesh.device,
        )
        self.is_split, self.divides_weight = is_split, not is_split
        self.group_dimension, self.groups = outputs[0], outputs[0].local_size
        self.query_dimension = Dimension("attention heads", heads, mesh.tp)

    def project(
        self, hidden: torch.Tensor, batch: int, splits_sequence: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The queries of this rank's heads, the keys and values of its groups (of all groups if they are not split),
        and the gates, if any.

        Shapes: `[b, s, h]` or `[b * s, h]` to `[b, s, a/t, d]`, two of `[b, s, g/t or g, d]`, and `[b, s, a/t, d]`.

        Args:
            batch: b.
        """
        if not self.is_split:
            return self._project_replicated(hidden, batch, splits_sequence)
        qkv = self.joint(hidden, self.bias, batch, splits_sequence)
        if self.is_gated:
            query, gate, key, value = qkv.split([self.group_size, self.group_size, 1, 1], dim=3)
            return query.flatten(2, 3), key.squeeze(3), value.squeeze(3), gate.flatten(2, 3)
        if self.group_size == 1:
            query, key, value = qkv.unbind(3)
            return query, key, value, None
        query, key, value = qkv.split([self.group_size, 1, 1], dim=3)
        return query.flatten(2, 3), key.squeeze(3), value.squeeze(3), None

    def joint(self, hidden: torch.Tensor, bias: torch.Tensor | None, batch: int, splits_sequence: bool) -> torch.Tensor:
        """The queries, gates, key and value of each of this rank's groups in one tensor; the groups must be split.

        Shapes: `[b, s, h]` or `[b * s, h]` to `[b, s, g/t, q + 2, d]`.
        """
        states = self.product(hidden, bias, splits_sequence)
        return states.view(batch, -1, self.groups, self.group_rows, self.head_size)

    def expanded(self, states: torch.Tensor) -> torch.Tensor:
        """Selects and repeats the keys or values of replicated groups for this rank's heads.

        Shapes: `[b, s, g, d]` to `[b, s, n, d]`, where n divides this rank's number of heads.
        """
        heads = self.query_dimension.local_size
        first = self.axis.rank * heads
        groups = [head // self.group_size for head in range(first, first + heads)]
        if heads % self.group_size == 0 or len(set(groups)) == 1:
            groups = sorted(set(groups))
        return states[:, :, groups]

    def _project_replicated(
        self, hidden: torch.Tensor, batch: int, splits_sequence: bool
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        weight = self._local_rows(copy_to(self.weight, self.axis))
        bias = None if self.bias is None else self._local_rows(copy_to(self.bias, self.axis))
        states = column_linear(hidden, weight, bias, self.axis, float8=self.float8, splits_sequence=splits_sequence)
        heads, groups = self.query_dimension.local_size, self.group_dimension.size
        counts = [groups, groups, *(heads,) * (1 + self.is_gated)]
        parts = states.view(batch, -1, sum(counts), self.head_size).split(counts, dim=2)
        key, value, query, *gates = parts
        return query, key, value, gates[0] if gates else None

    def _local_rows(self, values: torch.Tensor) -> torch.Tensor:
        """The rows of the replicated weight or bias for all keys, all values, this rank's queries and their gates.

        Shapes: `[g * (q + 2) * d, ...]` to `[(2g + q * g/t) * d, ...]`.
        """
        heads = self.query_dimension.local_size
        rows = values.unflatten(0, (-1, self.group_rows, self.head_size))
        local = [
            part.flatten(0, 1).narrow(0, self.axis.rank * heads, heads)
            for part in rows[:, :-2].split(self.group_size, dim=1)
        ]
        return torch.cat([rows[:, -2], rows[:, -1], *local]).flatten(0, 1)


class FusedHeads:
    """Queries, keys and values of one fused projection, with rotary positions applied; gates, if any.

    Compiled operations split and rotate the projection's output in one pass; without rotary positions they fuse the
    gradients of queries, keys, values and bias.

    Attributes:
        parts: see `HeadProjection`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, layer: int) -> None:
        self.qkv = qkv = QueryKeyValue(config, mesh)
        self.parts: dict[str, nn.Module] = {"linear_qkv": qkv}
        if config.qk_layernorm:
            self.parts["q_layernorm"] = build_head_norm(config, mesh, qkv.query_dimension)
            self.parts["k_layernorm"] = build_head_norm(config, mesh, qkv.group_dimension)
        self.norms = tuple(self.parts.values())[1:]
        is_rotary = config.is_rotary_layer(config.pattern_index(layer))
        self.rotary = Rotary(config, layer, mesh.kernels.rotary) if is_rotary else None
        is_plain = qkv.is_split and not self.norms and not qkv.is_gated
        self.is_fused = mesh.kernels.rotary is Implementation.CSRC and is_plain
        self.joins_gradients = self.is_fused and not is_rotary and qkv.head_size % 8 == 0

    def project(self, hidden: torch.Tensor, context: StepContext) -> tuple[Heads, torch.Tensor | None]:
        """Shapes: `[b, s/t, h]` or `[b * s, h]` to `[b, a/t, s, d]`, two of `[b, g/t, s, d]`, and `[b, s, a/t, d]`."""
        qkv, rotary = self.qkv, self.rotary
        batch, is_split = context.sample_ids.shape[0], context.splits_sequence
        if self.is_fused and rotary is not None and context.caches is None:  # for few tokens the code below is faster
            joint = qkv.joint(hidden, qkv.bias, batch, is_split)
            return split_rotated(joint, *rotary.angles(context, joint.shape[1]), **rotary.options), None
        if self.joins_gradients and qkv.bias is not None and _joins_now(hidden):
            return split_heads(qkv.joint(hidden, qkv.bias.detach(), batch, is_split), qkv.bias), None
        query, key, value, gate = qkv.project(hidden, batch, is_split)  # [b, s, a/t, d], [b, s, g, d]
        if self.norms:
            query, key = (norm(states) for norm, states in zip(self.norms, (query, key), strict=True))
        if not qkv.is_split:
            key, value = qkv.expanded(key), qkv.expanded(value)  # [b, s, g/t, d]
        query, key, value = query.transpose(1, 2), key.transpose(1, 2), value.transpose(1, 2)  # [b, a/t or g/t, s, d]
        if rotary is not None:
            query, key = rotary.rotate(query, key, context)
        return (query, key, value), gate


def _joins_now(hidden: torch.Tensor) -> bool:
    """True if joining gradients is faster.

    In half precision on a CPU torch's operations take two thirds of the time; for torch.compile they are used, too.
    """
    is_faster = hidden.is_cuda or hidden.dtype is torch.float32
    return is_faster and torch.is_grad_enabled() and not torch.compiler.is_compiling()
