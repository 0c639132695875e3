"""Parameters that some data-parallel ranks hold different ones of: how DeepSpeed is told, without a layer of its own.

DeepSpeed divides, broadcasts and averages a parameter over all data-parallel ranks. It has other groups for its own
layers of experts (`utils/groups.py`, `moe/utils.py`), which its optimizers look up by the name of a parameter group
(`runtime/zero/stage_1_and_2.py` and `runtime/bf16_optimizer.py`, `_configure_moe_settings`) or of a parameter
(`runtime/zero/stage3.py`, `_autoep_expert_parallel_group`), and ZeRO-3's partitioning by an attribute
(`runtime/zero/partition_parameters.py`, `_convert_to_deepspeed_param`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import deepspeed
from deepspeed.runtime import engine as deepspeed_engine
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from deepspeed.utils import groups
from torch import nn

from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of

_NAME = "experts"
# What a group of an optimizer's parameters needs in order to be divided over the ranks with the same experts.
EXPERT_GROUP: dict[str, Any] = {"moe": True, "name": _NAME}


def is_expert(parameter: nn.Parameter) -> bool:
    """Whether `mark_expert` has marked a parameter."""
    return not getattr(parameter, "allreduce", True)


def mark_expert(parameter: nn.Parameter, mesh: ParallelMesh) -> None:
    """Says of a parameter, before ZeRO-3 divides it, that other data-parallel ranks hold others, if so."""
    replicas = shard_spec_of(parameter).replicas(mesh)
    if replicas.ranks == mesh.gradient.ranks:
        return
    groups._EXPERT_PARALLEL_GROUP[_NAME] = mesh.expert_model.group  # between whose ranks norms are summed
    groups._EXPERT_DATA_PARALLEL_GROUP[_NAME] = mesh.expert_gradient.group
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[_NAME] = list(mesh.expert_gradient.ranks)
    facts = {
        "allreduce": False,
        "group_name": _NAME,
        "ds_zero_placement_family": "autoep_expert",
        "ds_zero_partition_group_name": _NAME,
        "ds_zero_partition_process_group": replicas.group,
    }
    for name, value in facts.items():
        setattr(parameter, name, value)


class PlacedInit(deepspeed.zero.Init):
    """`zero.Init`, which divides experts over the ranks that hold the same ones."""

    def __init__(self, mesh: ParallelMesh, **options: Any) -> None:
        super().__init__(**options)
        self._mesh = mesh

    def _zero_init_param(self, parameter: nn.Parameter) -> None:
        mark_expert(parameter, self._mesh)
        super()._zero_init_param(parameter)


class _ZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        known = {
            "has_moe_layers": True,
            "expert_parallel_group": groups._EXPERT_PARALLEL_GROUP,
            "expert_data_parallel_group": groups._EXPERT_DATA_PARALLEL_GROUP,
        }
        super().__init__(*arguments, **{**options, **known})


class _HalfPrecisionOptimizer(BF16_Optimizer):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "has_moe_layers": True})


@contextlib.contextmanager
def optimizers_for_experts(is_needed: bool) -> Iterator[None]:
    """Has an engine that is made in the block divide groups of `EXPERT_GROUP` among the ranks of experts."""
    if not is_needed:
        yield
        return
    deepspeed_engine.DeepSpeedZeroOptimizer = _ZeroOptimizer
    deepspeed_engine.BF16_Optimizer = _HalfPrecisionOptimizer
    try:
        yield
    finally:
        deepspeed_engine.DeepSpeedZeroOptimizer = DeepSpeedZeroOptimizer
        deepspeed_engine.BF16_Optimizer = BF16_Optimizer
