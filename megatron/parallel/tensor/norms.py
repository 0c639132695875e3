"""Norms whose channels are replicated, or split, over the tensor-parallel axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from megatron.kernels.choice import Implementation
from megatron.kernels.norms import add_norm, layer_norm, rms_norm
from megatron.parallel.mesh import Axis
from megatron.parallel.shard_spec import Dimension, ShardSpec, place
from megatron.parallel.tensor.collectives import copy_to, reduce_from


class _ReplicatedNorm(nn.Module):
    """A norm over the last dimension whose weight every rank of the axis holds.

    Shapes: `[..., h]` to the same.

    Args:
        zero_centered: the weight is stored as its difference from 1.
        partial: an axis whose ranks normalize different rows (the heads of a split attention), so that the gradients
            of the parameters are sums over it.
        implementation: of the norm's arithmetic.
    """

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
        self.eps, self.zero_centered, self.partial = eps, zero_centered, partial
        self.implementation = implementation
        self.weight = _norm_weight(ShardSpec.vector(hidden_size), zero_centered, device)

    def _added(
        self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        settings: dict[str, Any] = {"zero_centered": self.zero_centered, "implementation": self.implementation}
        return add_norm(x, residual, weight, bias, self.eps, subtract_mean=bias is not None, **settings)


class LayerNorm(_ReplicatedNorm):
    """Layer norm with weight and bias, replicated over the axis.

    Shapes: `[..., h]` to the same.
    """

    def __init__(self, hidden_size: int, eps: float, **settings: Any) -> None:
        super().__init__(hidden_size, eps, **settings)
        self.bias = place(
            nn.Parameter(torch.zeros(hidden_size, device=self.weight.device)), ShardSpec.vector(hidden_size)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes the last dimension."""
        weight, bias = self._weight_and_bias()
        return layer_norm(
            x, weight, bias, self.eps, zero_centered=self.zero_centered, implementation=self.implementation
        )

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + x`, and the norm of it."""
        weight, bias = self._weight_and_bias()
        return self._added(x, residual, weight, bias)

    def _weight_and_bias(self) -> tuple[torch.Tensor, torch.Tensor]:
        if self.partial is None:
            return self.weight, self.bias
        return copy_to(self.weight, self.partial), copy_to(self.bias, self.partial)


class RMSNorm(_ReplicatedNorm):
    """Division by the root mean square, with a weight and no bias, replicated over the axis.

    Shapes: `[..., h]` to the same.

    Source: Zhang and Sennrich, "Root mean square layer normalization", 2019, equation 4.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes the last dimension."""
        weight = _summed_gradient(self.weight, self.partial)
        return rms_norm(x, weight, self.eps, zero_centered=self.zero_centered, implementation=self.implementation)

    def add(self, x: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`residual + x`, and the norm of it."""
        weight = _summed_gradient(self.weight, self.partial)
        return self._added(x, residual, weight, None)


class HeadsRMSNorm(nn.Module):
    """RMS norm over the channels of all heads, which may be split over the axis: one all-reduce of a number per token.

    Shapes: `[b, s, heads/t, d]` to the same; weight `[heads/t, d]`.

    Args:
        heads: the dimension that counts the heads; if it is not split, `partial` is the axis whose ranks use different
            ones of them.
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
        self.eps, self.zero_centered, self.partial = eps, zero_centered, partial
        self.axis = heads.axis or Axis.single("tp")
        self.width = heads.size * head_size
        self.weight = _norm_weight(ShardSpec((heads, Dimension("head size", head_size))), zero_centered, device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalizes the channels of all heads of each token."""
        weight = _summed_gradient(self.weight, self.partial).float()
        values = x.float()
        squares = values.pow(2).sum(dim=(-2, -1), keepdim=True)  # [b, s, 1, 1]
        total = copy_to(reduce_from(squares, self.axis), self.axis)
        scaled = values * torch.rsqrt(total / self.width + self.eps)
        return (scaled * (weight + 1 if self.zero_centered else weight)).to(x.dtype)


def _norm_weight(spec: ShardSpec, zero_centered: bool, device: torch.device | str | None) -> nn.Parameter:
    initial = torch.zeros if zero_centered else torch.ones
    return place(nn.Parameter(initial(spec.local_shape, device=device)), spec)


def _summed_gradient(parameter: torch.Tensor, axis: Axis | None) -> torch.Tensor:
    """The parameter, with its gradient summed over an axis whose ranks use it for different rows."""
    return parameter if axis is None else copy_to(parameter, axis)
