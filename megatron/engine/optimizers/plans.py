"""The plan of each optimizer, by its name in --optimizer."""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any

from megatron.config import OptimConfig
from megatron.config.sections.optimizers import ADAM, LION, MUON, SCHEDULE_FREE, SGD
from megatron.engine.optimizers.adam import AdamPlan
from megatron.engine.optimizers.lion import LionPlan
from megatron.engine.optimizers.muon import MuonPlan
from megatron.engine.optimizers.plan import OptimizerPlan
from megatron.engine.optimizers.schedule_free import ScheduleFreePlan
from megatron.engine.optimizers.sgd import SgdPlan
from megatron.errors import ConfigError

PLANS: Mapping[str, type[OptimizerPlan[Any]]] = types.MappingProxyType(
    {ADAM: AdamPlan, MUON: MuonPlan, LION: LionPlan, SGD: SgdPlan, SCHEDULE_FREE: ScheduleFreePlan}
)


def plan_of(optim: OptimConfig) -> OptimizerPlan[Any]:
    """The plan of the configured optimizer.

    Raises:
        ConfigError: it is unknown.
    """
    if optim.optimizer not in PLANS:
        raise ConfigError(f"unknown --optimizer {optim.optimizer}. Use one of: {', '.join(PLANS)}.")
    return PLANS[optim.optimizer](optim)
