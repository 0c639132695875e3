"""Stochastic gradient descent with momentum."""

from __future__ import annotations

from typing import Any

import torch

from megatron.engine.optimizers.plan import MOMENTUM, OptimizerPlan
from megatron.kernels.choice import Implementation
from megatron.kernels.optimizer import eager


class SgdPlan(OptimizerPlan[torch.optim.Optimizer]):
    """SGD."""

    moments = MOMENTUM

    def build(self, groups: list[dict[str, Any]], implementation: Implementation) -> torch.optim.Optimizer:
        return eager(torch.optim.SGD)(groups, lr=self.optim.lr or 0.0, momentum=self.optim.sgd_momentum)
