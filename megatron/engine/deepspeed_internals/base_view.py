"""What a step, a checkpoint and a report ask of the optimizer inside a DeepSpeed engine, whatever it is."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.engine.gradients.gradient_stats import GradientStats
from megatron.engine.gradients.gradient_sum import Look, Partial, Tied, sum_in_backward
from megatron.engine.gradients.loss_scale import LossScale, ScaleRule
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.engine.tensor_parts import MasterSlice
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.tensor.weight_gradients import AddProduct

# Attributes of DeepSpeed's dynamic loss scaler (`runtime/fp16/loss_scaler.py`) that change from step to step.
SCALER_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class OptimizerView(ABC):
    """The optimizer inside a DeepSpeed engine.

    Attributes:
        optimizer: the torch optimizer, without DeepSpeed's wrapper.
        is_direct: whether it updates the network's own weights, all of them on every data-parallel rank.
        is_scaled: whether losses are multiplied by a scale, in fp16.
        takes_by_hooks: whether hooks of the backward pass take the gradients from the parameters.
    """

    is_direct = False
    takes_by_hooks = False
    _GROUPS = ""  # attribute of DeepSpeed's optimizer

    def __init__(self, engine: Any) -> None:
        self.optimizer: torch.optim.Optimizer = engine.basic_optimizer
        self._wrapper = engine.optimizer
        self.is_scaled = bool(engine.fp16_enabled())

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
        """The loss scale, 1 outside fp16; a tensor is always the same one. Shapes: `[]`."""
        return float(self._wrapper.cur_scale) if self.is_scaled else 1.0

    def loss_scale_state(self) -> dict[str, float]:
        """What changes of the loss scaler from step to step, for a checkpoint; nothing outside fp16."""
        scaler = self._wrapper.loss_scaler if self.is_scaled else None
        return {name: getattr(scaler, name) for name in SCALER_COUNTERS if hasattr(scaler, name)}

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        """Sets what `loss_scale_state` returned, so that a resumed run does not search for the scale again; nothing of
        a scale that stays.
        """
        if self.is_scaled and self._wrapper.loss_scaler.dynamic:
            for name in SCALER_COUNTERS:
                if name in state:
                    setattr(self._wrapper.loss_scaler, name, state[name])

    def sum_over_ranks(self, partial: Partial, tied: Tied) -> None:
        """Has more summed than averages, see `GradientOwner`: here by every backward pass, before DeepSpeed's hooks see
        the gradients. No weights are tied, as there are no stages.
        """
        sum_in_backward(partial)

    def figures(
        self, layers: Sequence[str], measures: Collection[str], trained: Sequence[nn.Parameter], mesh: ParallelMesh
    ) -> GradientStats | None:
        """Measures the gradients of each step; None if nothing is asked for, or they are not here."""
        return None

    def look_at_own(self, look: Look) -> None:  # noqa: B027  (DeepSpeed shows none)
        """Has a function see this rank's gradients of the next step before ranks sum them, where they are here."""

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        """Adds products that are gradients to their sums, where these are here; see `GradientSum.product_adder`."""
        return None

    @abstractmethod
    def guard(self, gate: UpdateGate) -> None:
        """Asks for permission before every update."""


def loss_scale_of(scaler: Any, device: torch.device) -> LossScale:
    """A loss scale that goes on as a scaler of DeepSpeed would."""
    if not scaler.dynamic:
        return LossScale(scaler.cur_scale, None, device)
    rule = ScaleRule(scaler.scale_window, scaler.delayed_shift, scaler.min_scale, scaler.consecutive_hysteresis)
    return LossScale(scaler.cur_scale, rule, device)
