"""The interface of an optimizer to the engine."""

from __future__ import annotations

import types
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import nn

from megatron.config import OptimConfig
from megatron.engine.optimizers.averages import AveragedWeights
from megatron.engine.tensor_parts import SliceOf
from megatron.kernels.choice import Implementation
from megatron.kernels.optimizer import count_updates
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import Kind

_Optimizer = TypeVar("_Optimizer", bound=torch.optim.Optimizer)

ADAMS_MOMENTS: Mapping[Kind, str] = types.MappingProxyType({"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"})
MOMENTUM: Mapping[Kind, str] = types.MappingProxyType({"exp_avg": "momentum_buffer"})


class OptimizerPlan(ABC, Generic[_Optimizer]):
    """Builds and connects an optimizer, and describes its state.

    Each optimizer has a subclass in its file, listed in `plans.py`. The engine groups trained parameters by
    `group_entries`, builds the optimizer from the groups, and connects it once DeepSpeed has moved the weights to flat
    tensors and made parameters slices of them. Flags that cannot be combined with the optimizer are rejected in
    `megatron/config/rules/`, before torch is imported.

    Args:
        optim: the resolved configuration section.

    Attributes:
        moments: for each kind of moment in a checkpoint, its name in the torch optimizer's state.
        offload_refusal: the reason why it cannot update in host memory, and a remedy; None if it can.
    """

    moments: ClassVar[Mapping[Kind, str]]
    offload_refusal: ClassVar[str | None] = None

    def __init__(self, optim: OptimConfig) -> None:
        self.optim = optim

    def group_entries(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """This optimizer's entries of a parameter's group; parameters with different ones are in different groups."""
        return {}

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], implementation: Implementation) -> _Optimizer:
        """Builds the torch optimizer.

        Args:
            groups: each with its `params`, `weight_decay`, `lr_multiplier` and `group_entries`.
            implementation: of AdamW.

        Raises:
            ConfigError: a required package is not installed.
        """

    def connect(
        self, optimizer: _Optimizer, trained: Sequence[nn.Parameter], slice_of: SliceOf, mesh: ParallelMesh
    ) -> None:
        """Describes the parts of parameters in the optimizer's tensors, before the first step; collective."""

    def moments_of(self, parameter: nn.Parameter) -> Mapping[Kind, str]:
        """The `moments` of one parameter."""
        return self.moments

    def averages(self, optimizer: _Optimizer, masters: Sequence[torch.Tensor]) -> AveragedWeights | None:
        """The averages of the tensors that the optimizer updates; None if none are kept."""
        decay = self.optim.ema_decay
        return None if decay is None else AveragedWeights(masters, decay)

    def weight_of(self, optimizer: _Optimizer, learning_rate: float) -> float:
        """The weight of an update at this learning rate in the average of iterates; 0 without such an average."""
        return 0.0

    def resume(self, optimizer: _Optimizer, master: torch.Tensor, updates: int, weight: float) -> None:
        """Sets the number of updates of a tensor's loaded state, and the sum of their `weight_of`."""
        count_updates(optimizer, master, updates)
