"""The gradient norm of the whole network, and the factor that limits it, without waiting for the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from megatron.kernels import multi_tensor
from megatron.kernels.choice import Implementation
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_sum

_EPSILON = 1.0e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Clipping:
    """How gradients are measured and limited.

    Attributes:
        limit: the norm above which gradients are scaled down; 0 for no limit.
        model: the ranks that hold one copy of the network, each of which measures its own part.
        device: where gradients are.
        implementation: of the norm.
    """

    limit: float
    model: Axis
    device: torch.device
    implementation: Implementation = Implementation.TORCH

    def norm(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The global 2-norm; collective over the ranks of a copy.

        Args:
            gradients: what this rank counts; there may be none.

        Shapes: result `[]` float64.
        """
        if gradients:
            square = multi_tensor.square_sum(gradients, implementation=self.implementation)
        else:
            square = torch.zeros((), dtype=torch.float64, device=self.device)
        return all_reduce_sum(square, self.model).sqrt()

    def factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """What the gradients are multiplied by, at most 1; None without a limit.

        Shapes: result `[]` float32.
        """
        return (self.limit / (norm + _EPSILON)).clamp(max=1.0).to(torch.float32) if self.limit > 0.0 else None
