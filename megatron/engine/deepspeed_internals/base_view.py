"""What a step, a checkpoint and a report ask of the optimizer inside a DeepSpeed engine, whatever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.engine.deepspeed_internals.loss_scaler import counters_of, restore_counters
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.engine.tensor_parts import MasterSlice


class OptimizerView(ABC):
    """The optimizer inside a DeepSpeed engine.

    Attributes:
        optimizer: the torch optimizer, without DeepSpeed's wrapper.
        is_direct: whether it updates the network's own weights, all of them on every data-parallel rank.
        takes_by_hooks: whether hooks of the backward pass take the gradients from the parameters.
    """

    is_direct = False
    takes_by_hooks = False
    _GROUPS = ""  # attribute of DeepSpeed's optimizer

    def __init__(self, engine: Any) -> None:
        self.optimizer: torch.optim.Optimizer = engine.basic_optimizer
        self._wrapper = engine.optimizer

    @property
    def can_skip(self) -> bool:
        """Whether a flag on the device can drop an update."""
        return False

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The network's trained parameters, in the groups in which they are divided among ranks."""
        return getattr(self._wrapper, self._GROUPS)  # type: ignore[no-any-return]

    def masters(self) -> Sequence[torch.Tensor]:
        """The tensors that the torch optimizer updates, in the order of its groups."""
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]

    @abstractmethod
    def slice_of(self, parameter: nn.Parameter) -> MasterSlice | None:
        """The part of a trained parameter that this rank updates; None if it updates nothing of it."""

    @abstractmethod
    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """The gradients that this rank holds when the update begins, averaged over the data-parallel ranks."""

    @abstractmethod
    def gradients(self) -> Iterator[torch.Tensor]:
        """All tensors that hold gradients when the update begins; some of them show the same memory."""

    def refresh_weights(self) -> None:
        """Makes the network compute with the fp32 weights as they are now; collective."""
        self._wrapper.update_lp_params()

    def norm(self) -> torch.Tensor | float:
        """Global 2-norm of the last step's gradient before clipping; NaN if DeepSpeed took none."""
        norm = getattr(self._wrapper, "_global_grad_norm", None)
        return float("nan") if norm is None else norm

    def loss_scale(self) -> float | torch.Tensor:
        """The loss scale, in fp16; a tensor is always the same one. Shapes: `[]`."""
        return float(self._wrapper.cur_scale)

    def loss_scale_state(self) -> dict[str, float]:
        """What changes of the loss scaler from step to step, in fp16."""
        return counters_of(self._wrapper.loss_scaler)

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        """Sets what `loss_scale_state` returned, and nothing else that a record may name."""
        restore_counters(self._wrapper.loss_scaler, state)

    @abstractmethod
    def guard(self, gate: UpdateGate) -> None:
        """Asks for permission before every update."""
