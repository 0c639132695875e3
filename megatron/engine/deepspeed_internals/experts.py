"""Expert parameters, which differ between data-parallel ranks, in DeepSpeed without its own MoE layer.

DeepSpeed partitions, broadcasts and averages a parameter over all data-parallel ranks, except the parameters of its own
MoE layers (`utils/groups.py`, `moe/utils.py`). Its optimizers find the process group by the name of a parameter group
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
# The entries of a parameter group that is partitioned over the ranks with the same experts.
EXPERT_GROUP: dict[str, Any] = {"moe": True, "name": _NAME}


def is_expert(parameter: nn.Parameter) -> bool:
    """Returns True if `mark_expert` has marked a parameter."""
    return not getattr(parameter, "allreduce", True)


def mark_expert(parameter: nn.Parameter, mesh: ParallelMesh) -> None:
    """Marks a parameter that differs between data-parallel ranks; must be called before ZeRO-3 partitions it."""
    replicas = shard_spec_of(parameter).replicas(mesh)
    if replicas.ranks == mesh.gradient.ranks:
        return
    groups._EXPERT_PARALLEL_GROUP[_NAME] = mesh.expert_model.group  # norms are summed over it
    groups._EXPERT_DATA_PARALLEL_GROUP[_NAME] = mesh.expert_gradient.group
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[_NAME] = list(mesh.expert_gradient.ranks)
    attributes = {
        "allreduce": False,
        "group_name": _NAME,
        "ds_zero_placement_family": "autoep_expert",
        "ds_zero_partition_group_name": _NAME,
        "ds_zero_partition_process_group": replicas.group,
    }
    for name, value in attributes.items():
        setattr(parameter, name, value)


class PlacedInit(deepspeed.zero.Init):
    """`zero.Init` that partitions experts over the ranks with the same experts."""

    def __init__(self, mesh: ParallelMesh, **options: Any) -> None:
        super().__init__(**options)
        self._mesh = mesh

    def _zero_init_param(self, parameter: nn.Parameter) -> None:
        mark_expert(parameter, self._mesh)
        super()._zero_init_param(parameter)


class _ZeroOptimizer(DeepSpeedZeroOptimizer):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        experts = {
            "has_moe_layers": True,
            "expert_parallel_group": groups._EXPERT_PARALLEL_GROUP,
            "expert_data_parallel_group": groups._EXPERT_DATA_PARALLEL_GROUP,
        }
        super().__init__(*arguments, **{**options, **experts})


class _HalfPrecisionOptimizer(BF16_Optimizer):  # type: ignore[misc]
    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **{**options, "has_moe_layers": True})


@contextlib.contextmanager
def optimizers_for_experts(is_needed: bool) -> Iterator[None]:
    """Makes engines built in the block partition groups with `EXPERT_GROUP` over the ranks with the same experts."""
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
