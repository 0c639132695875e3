"""Norms whose channels are replicated, or split, over the tensor-parallel axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.kernels.choice import Implementation
from megatron.kernels.norms import add_norm, layer_norm, rms_norm
from megatron.parallel.mesh import Axis
from megatron.parallel.shard_spec import Dimension, ShardSpec, annotate, shard_spec_of
from megatron.parallel.tensor.collectives import copy_to, reduce_from
from megatron.parallel.tensor.direct_module import DirectModule


class _ReplicatedNorm(DirectModule):
    """A norm over the last dimension with a replicated weight.

    Shapes: `[..., h]` to the same.

    Args:
        zero_centered: the weight is stored as its difference from 1.
        partial: an axis whose ranks normalize different rows (the heads of a split attention, or their own tokens), so
            that the gradients of the parameters are sums over it.
        implementation: of the norm's arithmetic.
    """

    subtracts_mean: bool

    def __init__(
        self,
        hidden_size: int,
        eps: float,
        *,
        zero_centered: bool = False,
        partial: Axis | None = None,
        device: torch.device | str | None = None,
        implementation: Implementation = Implementation.TORCH,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.implementation = implementation
        self.weight = _norm_weight(ShardSpec.vector(hidden_size, partial=partial), zero_centered, device)
        self.bias: nn.Parameter | None = None

    def add(
        self, x: torch.Tensor, residual: torch.Tensor | None, branch_bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + (x + branch_bias)`, without missing terms, and its norm."""
        return add_norm(
            x,
            residual,
            self.weight,
            self.bias,
            self.eps,
            subtract_mean=self.subtracts_mean,
            branch_bias=branch_bias,
            zero_centered=self.zero_centered,
            implementation=self.implementation,
        )


class LayerNorm(_ReplicatedNorm):
    """Layer norm with weight and bias, replicated over the axis.

    Shapes: `[..., h]` to the same.
    """

    subtracts_mean = True

    def __init__(self, hidden_size: int, eps: float, **settings: Any) -> None:
        super().__init__(hidden_size, eps, **settings)
        spec = shard_spec_of(self.weight)
        self.bias = annotate(nn.Parameter(torch.zeros(hidden_size, device=self.weight.device)), spec)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"zero_centered": self.zero_centered, "implementation": self.implementation}
        return layer_norm(x, self.weight, self.bias, self.eps, **options)


class RMSNorm(_ReplicatedNorm):
    """Division by the root mean square, with a weight and no bias, replicated over the axis.

    Shapes: `[..., h]` to the same.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019, equation 4.
    """

    subtracts_mean = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps, zero_centered=self.zero_centered, implementation=self.implementation)


class HeadsRMSNorm(nn.Module):
    """RMS norm over the channels of all heads, which an axis may split: one all-reduce of a number per token.

    Shapes: `[b, s, heads/t, d]` to the same; weight `[heads/t, d]`.

    Args:
        heads: the dimension of heads; if it is not split, `partial` is the axis whose ranks use different heads.
    """

    def __init__(
        self,
        heads: Dimension,
        head_size: int,
        eps: float,
        *,
        zero_centered: bool = False,
        partial: Axis | None = None,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.eps, self.zero_centered = eps, zero_centered
        self.axis = heads.axis or Axis.single("tp")
        self.width = heads.size * head_size
        summed_over = () if partial is None else (partial,)
        spec = ShardSpec((heads, Dimension("head size", head_size)), summed_over=summed_over)
        self.weight = _norm_weight(spec, zero_centered, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes the channels of all heads of each token."""
        weight = self.weight.float()
        values = x.float()
        squares = values.pow(2).sum(dim=(-2, -1), keepdim=True)  # [b, s, 1, 1]
        total = copy_to(reduce_from(squares, self.axis), self.axis)
        scaled = values * torch.rsqrt(total / self.width + self.eps)
        return (scaled * (weight + 1 if self.zero_centered else weight)).to(x.dtype)


def _norm_weight(spec: ShardSpec, zero_centered: bool, device: torch.device | str | None) -> nn.Parameter:
    initial = torch.zeros if zero_centered else torch.ones
    return annotate(nn.Parameter(initial(spec.local_shape, device=device)), spec)
