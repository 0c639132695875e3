"""The optimizer that the configuration names, over groups of parameters."""

from __future__ import annotations

from typing import Any

import torch

from megatron.config import OptimConfig
from megatron.config.sections.optimizers import ADAM, LION, MUON, OPTIMIZERS, SCHEDULE_FREE, SGD
from megatron.engine.optimizers.lion import Lion
from megatron.engine.optimizers.muon import IS_ORTHOGONAL, Muon, MuonSettings
from megatron.engine.optimizers.schedule_free import ScheduleFree
from megatron.errors import ConfigError
from megatron.kernels.choice import Implementation
from megatron.kernels.optimizer import build_adamw, build_eight_bit_adamw, eager

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def make_optimizer(
    optim: OptimConfig, groups: list[dict[str, Any]], implementation: Implementation
) -> torch.optim.Optimizer:
    """Makes it.

    Args:
        groups: each with its `params`, `weight_decay` and `lr_multiplier`.
        implementation: of AdamW.

    Raises:
        ConfigError: the optimizer is unknown, or its implementation is not installed.
    """
    rate = optim.lr or 0.0
    if optim.optimizer == ADAM:
        return _adamw(optim, groups, implementation)
    if optim.optimizer == SGD:
        return eager(torch.optim.SGD)(groups, lr=rate, momentum=optim.sgd_momentum)
    if optim.optimizer == LION:
        return Lion(groups, rate, (optim.lion_beta1, optim.lion_beta2))
    if optim.optimizer == SCHEDULE_FREE:
        _set_epsilon(optim, groups)
        betas = (optim.adam_beta1, optim.adam_beta2)
        return ScheduleFree(groups, rate, betas, optim.schedule_free_weight_lr_power)
    if optim.optimizer == MUON:
        others = [group for group in groups if not group.get(IS_ORTHOGONAL)]
        settings = MuonSettings(
            momentum=optim.muon_momentum,
            nesterov=optim.muon_nesterov,
            coefficients=optim.muon_coefficient_type,
            steps=optim.muon_num_ns_steps,
            scale=optim.muon_scale_mode,
            extra_scale=optim.muon_extra_scale_factor,
            dtype=_DTYPES[optim.muon_dtype],
        )
        return Muon(groups, _adamw(optim, others, implementation) if others else None, rate, settings)
    raise ConfigError(f"--optimizer {optim.optimizer} is not known. Use one of: {', '.join(OPTIMIZERS)}.")


def _adamw(optim: OptimConfig, groups: list[dict[str, Any]], implementation: Implementation) -> torch.optim.Optimizer:
    rate, betas = optim.lr or 0.0, (optim.adam_beta1, optim.adam_beta2)
    _set_epsilon(optim, groups)
    if optim.use_bnb_optimizer:
        return build_eight_bit_adamw(groups, lr=rate, betas=betas)
    return build_adamw(groups, lr=rate, betas=betas, implementation=implementation)


def _set_epsilon(optim: OptimConfig, groups: list[dict[str, Any]]) -> None:
    for group in groups:
        group["eps"] = optim.adam_eps * group["lr_multiplier"]
