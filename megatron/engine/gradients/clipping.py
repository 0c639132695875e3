"""The gradient norm of the whole network, and the factor that limits it, without waiting for the device."""

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

    @cached_property
    def _limit(self) -> torch.Tensor:
        return torch.full((), self.limit, dtype=torch.float64, device=self.device)

    @cached_property
    def _one(self) -> torch.Tensor:
        return torch.ones((), dtype=torch.float64, device=self.device)

    def norm(self, gradients: Sequence[torch.Tensor], divided_over: Axis | None = None) -> torch.Tensor:
        """The global 2-norm; collective over the ranks of a copy, and of `divided_over`.

        Args:
            gradients: what this rank counts; there may be none.
            divided_over: the data-parallel ranks, if each counts a part of the gradients.

        Shapes: result `[]` float64.
        """
        if gradients:
            square = multi_tensor.square_sum(gradients, implementation=self.implementation)
        else:
            square = torch.zeros((), dtype=torch.float64, device=self.device)
        square = square.to(self.device)  # from the host, if it has the gradients
        if divided_over is not None:
            all_reduce_sum(square, divided_over)
        return all_reduce_sum(square, self.model).sqrt()

    def factor(self, norm: torch.Tensor) -> torch.Tensor | None:
        """What the gradients are multiplied by, at most 1; None without a limit.

        It is finite also if the norm is not, so that zeros between gradients, such as padding, stay zero.

        Shapes: result `[]` float32.
        """
        if self.limit <= 0.0:
            return None
        return torch.fmin(self._limit / (norm + _EPSILON), self._one).to(torch.float32)
