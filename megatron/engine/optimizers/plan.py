"""What the engine asks of an optimizer, whichever it is."""

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
    """How an optimizer is built, what it is connected to, and what it keeps of the parameters that it updates.

    Each optimizer has a subclass in its file, listed in `plans.py`. The engine asks for the entries of every trained
    parameter's group, has the optimizer built from such groups, and connects it once the weights lie where it updates
    them: in flat tensors, of which a parameter is a slice. Flags that cannot be combined with it are refused in
    `megatron/config/rules/`, before torch is imported.

    Args:
        optim: the resolved section.

    Attributes:
        moments: what it keeps of a parameter, by its kind in a checkpoint: the name in the torch optimizer's state.
        offload_refusal: why it cannot update in the memory of the host, and the way out; None if it can.
    """

    moments: ClassVar[Mapping[Kind, str]]
    offload_refusal: ClassVar[str | None] = None

    def __init__(self, optim: OptimConfig) -> None:
        self.optim = optim

    def group_entries(self, parameter: nn.Parameter) -> Mapping[str, Any]:
        """The entries of a parameter's group that the optimizer reads; what differs in them is in different groups."""
        return {}

    @abstractmethod
    def build(self, groups: list[dict[str, Any]], implementation: Implementation) -> _Optimizer:
        """Builds the torch optimizer.

        Args:
            groups: each with its `params`, `weight_decay`, `lr_multiplier` and `group_entries`.
            implementation: of AdamW.

        Raises:
            ConfigError: what it needs is not installed.
        """

    def connect(
        self, optimizer: _Optimizer, trained: Sequence[nn.Parameter], slice_of: SliceOf, mesh: ParallelMesh
    ) -> None:
        """Tells the optimizer which parts of which parameters its tensors hold, before the first step; collective."""

    def moments_of(self, parameter: nn.Parameter) -> Mapping[Kind, str]:
        """The same as `moments`, of one parameter."""
        return self.moments

    def averages(self, optimizer: _Optimizer, masters: Sequence[torch.Tensor]) -> AveragedWeights | None:
        """The means of the tensors that the optimizer updates; None if there are none."""
        decay = self.optim.ema_decay
        return None if decay is None else AveragedWeights(masters, decay)

    def weight_of(self, optimizer: _Optimizer, learning_rate: float) -> float:
        """The weight of an update at this rate in the mean of the iterates; 0 if there is no such mean."""
        return 0.0

    def resume(self, optimizer: _Optimizer, master: torch.Tensor, updates: int, weight: float) -> None:
        """Sets how many updates are behind the loaded state of a tensor, and the sum of their `weight_of`."""
        count_updates(optimizer, master, updates)
