"""The norms of a network, built from its configuration."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.config import ModelConfig
from megatron.config.architecture.norms import LAYER_NORM
from megatron.model.interface.residual_sum import ResidualSum, total
from megatron.model.interface.step_context import StepContext
from megatron.parallel.mesh import Axis, ParallelMesh
from megatron.parallel.shard_spec import Dimension
from megatron.parallel.tensor.norms import HeadsRMSNorm, LayerNorm, RMSNorm


def build_norm(
    config: ModelConfig,
    mesh: ParallelMesh,
    size: int,
    *,
    partial: Axis | None = None,
    epsilon: float | None = None,
) -> LayerNorm | RMSNorm:
    """Builds a norm over `size` channels.

    Args:
        epsilon: None for the configured one.
        partial: an axis whose ranks normalize different rows, see `LayerNorm`.
    """
    kind = LayerNorm if config.normalization == LAYER_NORM else RMSNorm
    kernel = mesh.kernels.norm
    epsilon = config.layernorm_epsilon if epsilon is None else epsilon
    return kind(size, epsilon, partial=partial, implementation=kernel, **_settings(config, mesh))


def build_hidden_norm(config: ModelConfig, mesh: ParallelMesh) -> LayerNorm | RMSNorm:
    """Builds a norm of hidden states, split by tokens with sequence parallelism.

    Shapes: `[b, s/t, h]` to the same.
    """
    return build_norm(config, mesh, config.hidden_size, partial=mesh.sequence_parallel)


def build_head_norm(config: ModelConfig, mesh: ParallelMesh, heads: Dimension) -> nn.Module:
    """Builds the norm of queries or keys `[b, s, heads/t, d]`, over each head or over all of them.

    Args:
        heads: the dimension that counts the heads of the queries or of the keys.
    """
    if config.qk_layernorm_scope == "head":
        return build_norm(config, mesh, config.kv_channels, partial=mesh.tp)
    return HeadsRMSNorm(
        heads,
        config.kv_channels,
        config.layernorm_epsilon,
        partial=None if heads.axis is not None else mesh.tp,
        **_settings(config, mesh),
    )


def build_norm_layer(config: ModelConfig, mesh: ParallelMesh) -> nn.Module:
    """Builds a norm of hidden states as a layer: after the word embedding, or after the last block, whose residual it
    may have to add.

    Shapes: `[b, s/t, h]` to the same.
    """
    kind = _LayerNormLayer if config.normalization == LAYER_NORM else _RMSNormLayer
    kernel = mesh.kernels.norm
    settings = {"partial": mesh.sequence_parallel, "implementation": kernel, **_settings(config, mesh)}
    return kind(config.hidden_size, config.layernorm_epsilon, **settings)


class NoNorm(nn.Identity):
    """The stand-in for a norm that a block does not have."""

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, branch_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Returns `residual + (x + branch_bias)`, without the terms that are None, twice."""
        hidden = total(x, residual, branch_bias)
        return hidden, hidden


class _LayerNormLayer(LayerNorm):
    takes_sum = True

    def forward(self, x: torch.Tensor | ResidualSum, context: StepContext) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) if isinstance(x, torch.Tensor) else context.by_sample(self.add(*x)[1])


class _RMSNormLayer(RMSNorm):
    takes_sum = True

    def forward(self, x: torch.Tensor | ResidualSum, context: StepContext) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x) if isinstance(x, torch.Tensor) else context.by_sample(self.add(*x)[1])


def _settings(config: ModelConfig, mesh: ParallelMesh) -> dict[str, Any]:
    return {"zero_centered": config.apply_layernorm_1p, "device": mesh.device}
