"""The dense feed-forward layer, plain or gated."""

from __future__ import annotations

import torch

from megatron.config import ModelConfig
from megatron.kernels.activations import activation, gated
from megatron.kernels.choice import Implementation
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import Dimension
from megatron.parallel.tensor.direct_module import DirectModule
from megatron.parallel.tensor.layers import ColumnParallelLinear, Finish, RowParallelLinear


class FeedForward(DirectModule):
    """`fc2(activation(fc1(x)))`, or `fc2(activation(gate) * up)` with both products in `fc1`; the inner dimension is
    split over the tensor-parallel axis.

    Shapes: `[b, s, h]`, with sequence parallelism `[b, s/t, h]`, to the same; inside `[b, s, f/t]`, gated
        `[b, s, 2, f/t]` in the order gate, up.

    Args:
        inner_size: f; None for the configured `ffn_hidden_size`.
    """

    def __init__(self, config: ModelConfig, mesh: ParallelMesh, *, inner_size: int | None = None) -> None:
        super().__init__()
        self.activation, self.is_gated = config.activation_function, config.gated_linear_unit
        self.limit, self.offset = config.activation_func_clamp_value, config.glu_linear_offset
        self.implementation = mesh.kernels.activation
        width = config.ffn_hidden_size if inner_size is None else inner_size
        inner = Dimension("outputs of a linear layer", width, mesh.tp)
        outputs = (Dimension("gate and up", 2, parts=(1, 1)), inner) if self.is_gated else (inner,)
        self.linear_fc1 = ColumnParallelLinear(
            config.hidden_size,
            outputs,
            mesh.tp,
            bias=config.mlp_bias,
            device=mesh.device,
        )
        self.linear_fc2 = RowParallelLinear(
            width,
            config.hidden_size,
            mesh.tp,
            bias=config.mlp_bias,
            partial=mesh.sequence_parallel,
            device=mesh.device,
        )

    def forward(self, hidden: torch.Tensor, context: StepContext, finish: Finish | None = None) -> torch.Tensor:
        """Applies the layer; with `finish`, returns `finish(product, bias)` of the last layer."""
        is_split = context.splits_sequence
        if self.implementation is Implementation.CSRC:
            inner = self.linear_fc1(hidden, self._activate, splits_sequence=is_split)
        else:
            inner = self._activate(self.linear_fc1(hidden, splits_sequence=is_split))
        return self.linear_fc2(inner, finish, splits_sequence=is_split)  # type: ignore[no-any-return]

    def _activate(self, inner: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.is_gated:
            pair = inner.unflatten(-1, (2, -1))
            return gated(
                pair,
                self.activation,
                bias=bias,
                limit=self.limit,
                offset=self.offset,
                implementation=self.implementation,
            )
        return activation(inner, self.activation, bias=bias, implementation=self.implementation)
