"""Lion: the sign of momentum, with one moment.

Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023 (arXiv 2302.06675), algorithm 2.
"""

from __future__ import annotations

import types
from typing import Any

import torch

from megatron.engine.optimizers.plan import OptimizerPlan
from megatron.kernels.choice import Implementation
from megatron.kernels.optimizer import gradients_unless_skipped, unless_skipped


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay; element-wise, so its tensors may be parts of parameters.

    A step is skipped if `found_inf` is set, as by `torch.amp.GradScaler`, and not 0.

    Args:
        groups: each with its `params` and `weight_decay`.
        betas: the weight of the momentum in the update, and the decay of the momentum.
    """

    can_skip = True

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            rate, (update_weight, decay) = group["lr"], group["betas"]
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if self.state[parameter].get("exp_avg") is None:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            if not parameters:
                continue
            momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
            gradients = gradients_unless_skipped(skip, [each.grad for each in parameters], momenta)  # type: ignore[misc]
            directions = torch._foreach_lerp(gradients, momenta, update_weight)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(directions, unless_skipped(skip, -rate, 0.0))
            torch._foreach_mul_(parameters, unless_skipped(skip, 1.0 - rate * group["weight_decay"], 1.0))
            torch._foreach_add_(parameters, directions)
            torch._foreach_lerp_(momenta, gradients, 1.0 - decay)


class LionPlan(OptimizerPlan[Lion]):
    """Lion."""

    moments = types.MappingProxyType({"exp_avg": "exp_avg"})

    def build(self, groups: list[dict[str, Any]], implementation: Implementation) -> Lion:
        return Lion(groups, self.optim.lr or 0.0, (self.optim.lion_beta1, self.optim.lion_beta2))
