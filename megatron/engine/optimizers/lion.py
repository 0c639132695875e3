"""Lion: the sign of momentum, with one moment.

Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023 (arXiv 2302.06675), algorithm 2.
"""

from __future__ import annotations

from typing import Any

import torch


class Lion(torch.optim.Optimizer):
    """Lion with decoupled weight decay; it goes element by element, so that its tensors may be parts of parameters.

    Args:
        groups: each with its `params` and `weight_decay`.
        betas: the share of the momentum in the update, and the share of it that is kept.
    """

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float]) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates the parameters that have a gradient."""
        for group in self.param_groups:
            rate, (of_update, kept) = group["lr"], group["betas"]
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in parameters:
                if self.state[parameter].get("exp_avg") is None:
                    self.state[parameter]["exp_avg"] = torch.zeros_like(parameter)
            if not parameters:
                continue
            momenta = [self.state[parameter]["exp_avg"] for parameter in parameters]
            gradients = [parameter.grad.to(parameter.dtype) for parameter in parameters]  # type: ignore[union-attr]
            directions = torch._foreach_lerp(gradients, momenta, of_update)
            torch._foreach_sign_(directions)
            torch._foreach_mul_(parameters, 1.0 - rate * group["weight_decay"])
            torch._foreach_add_(parameters, directions, alpha=-rate)
            torch._foreach_lerp_(momenta, gradients, 1.0 - kept)
