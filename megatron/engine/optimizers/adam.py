"""AdamW in all implementations; other optimizers use it for some of their parameters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from megatron.config import OptimConfig
from megatron.engine.optimizers.plan import ADAMS_MOMENTS, OptimizerPlan
from megatron.kernels.choice import Implementation
from megatron.kernels.optimizer import build_adamw, build_eight_bit_adamw


class AdamPlan(OptimizerPlan[torch.optim.Optimizer]):
    """AdamW; with 8-bit moments, embeddings are separate groups with float32 moments."""

    moments = ADAMS_MOMENTS

    def group_entries(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        if not self.optim.use_bnb_optimizer:
            return {}
        return {"keeps_float32": getattr(parameter, "global_name", "").startswith("embedding.")}

    def build(self, groups: list[dict[str, Any]], implementation: Implementation) -> torch.optim.Optimizer:
        return adamw(self.optim, groups, implementation)


def adamw(optim: OptimConfig, groups: list[dict[str, Any]], implementation: Implementation) -> torch.optim.Optimizer:
    """Builds AdamW with the constants of a configuration section."""
    rate, betas = optim.lr or 0.0, (optim.adam_beta1, optim.adam_beta2)
    scale_epsilon(optim, groups)
    if optim.use_bnb_optimizer:
        return build_eight_bit_adamw(groups, lr=rate, betas=betas)
    return build_adamw(groups, lr=rate, betas=betas, implementation=implementation)


def scale_epsilon(optim: OptimConfig, groups: list[dict[str, Any]]) -> None:
    """Sets each group's epsilon, scaled by the factor of its learning rate, as its gradients are."""
    for group in groups:
        group["eps"] = optim.adam_eps * group["lr_multiplier"]
