"""The global gradient norm and the clipping factor, without synchronization with the host."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from megatron.kernels import multi_tensor
from megatron.kernels.choice import Implementation
from megatron.parallel.mesh import Axis
from megatron.parallel.messages import all_reduce_sum

_EPSILON = 1.0e-6  # as torch.nn.utils.clip_grad_norm_


@dataclass(frozen=True)
class Clipping:
    """Measures and clips gradients.

    Attributes:
        limit: the norm above which gradients are scaled down; 0 for no limit.
        model: the ranks that hold one copy of the network; each measures its part.
        device: of the gradients.
        implementation: of the norm.
    """

    limit: float
    model: Axis
    device: torch.device
    implementation: Implementation = Implementation.TORCH

    @cached_property
    def _limit(self) -> torch.Tensor:
        return torch.full((), self.limit, dtype=torch.float64, device=self.device)

    @cached_property
    def _one(self) -> torch.Tensor:
        return torch.ones((), dtype=torch.float64, device=self.device)

    def norm(self, gradients: Sequence[torch.Tensor], divided_over: Axis | None = None) -> torch.Tensor:
        """The global 2-norm; collective over the ranks of a copy, and of `divided_over`.

        Args:
            gradients: the gradients that this rank counts; may be empty.
            divided_over: the data-parallel ranks, if each counts a part of the gradients.

        Shapes: result `[]` float64.
        """
        if gradients:
            square = multi_tensor.square_sum(gradients, implementation=self.implementation)
        else:
            square = torch.zeros((), dtype=torch.float64, device=self.device)
        square = square.to(self.device)  # offloaded gradients are in host memory
        if divided_over is not None:
            all_reduce_sum(square, divided_over)
        return all_reduce_sum(square, self.model).sqrt()

    def factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """The factor of the gradients, at most 1; None without a limit.

        Shapes: result `[]` float32.
        """
        if self.limit <= 0.0:
            return None
        # Finite even if the norm is not, so that padding between gradients stays zero.
        return torch.fmin(self._limit / (norm + _EPSILON), self._one).to(torch.float32)
