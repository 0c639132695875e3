"""The interface of the optimizer inside a DeepSpeed engine, for steps, checkpoints and reports."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from megatron.engine.gradients.gradient_stats import GradientStats
from megatron.engine.gradients.gradient_sum import BucketHook, Partial, Tied, sum_in_backward
from megatron.engine.gradients.loss_scale import LossScale, ScaleRule
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.engine.tensor_parts import MasterSlice
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.tensor.weight_gradients import AddProduct

# The state of DeepSpeed's dynamic loss scaler (`runtime/fp16/loss_scaler.py`).
SCALER_COUNTERS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


class OptimizerView(ABC):
    """The optimizer inside a DeepSpeed engine.

    Attributes:
        optimizer: the torch optimizer, without DeepSpeed's wrapper.
        is_direct: it updates the network's own weights, all of them on every data-parallel rank.
        is_scaled: losses are multiplied by a loss scale, in fp16.
        takes_by_hooks: hooks of the backward pass take the gradients from the parameters.
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
        """True if a flag on the device can skip an update."""
        return False

    def groups(self) -> Sequence[Sequence[nn.Parameter]]:
        """The network's trained parameters, in the groups that are divided over ranks."""
        return getattr(self._wrapper, self._GROUPS)  # type: ignore[no-any-return]

    def masters(self) -> Sequence[torch.Tensor]:
        """The tensors that the torch optimizer updates, in the order of its groups."""
        return [tensor for group in self.optimizer.param_groups for tensor in group["params"]]

    @abstractmethod
    def slice_of(self, parameter: nn.Parameter) -> MasterSlice | None:
        """The part of a trained parameter that this rank updates; None if it updates none."""

    @abstractmethod
    def reduced_gradients(self) -> Iterator[torch.Tensor]:
        """The gradients on this rank at the start of the update, averaged over the data-parallel ranks."""

    @abstractmethod
    def gradients(self) -> Iterator[torch.Tensor]:
        """All tensors with gradients at the start of the update; some share memory."""

    @abstractmethod
    def refresh_weights(self) -> None:
        """Copies the fp32 weights to the network; collective. See `await_weights`."""

    def await_weights(self, parameters: Iterable[nn.Parameter] | None = None) -> None:  # noqa: B027
        """Waits until the network's weights are those of the last update; all by default.

        To be called before these parameters are read or the optimizer's tensors are changed.
        """

    def norm(self) -> torch.Tensor | float:
        """Global 2-norm of the last step's gradient before clipping; NaN if DeepSpeed did not compute it."""
        norm = getattr(self._wrapper, "_global_grad_norm", None)
        return float("nan") if norm is None else norm

    def loss_scale(self) -> float | torch.Tensor:
        """The loss scale, 1 outside fp16; if a tensor, always the same object. Shapes: `[]`."""
        return float(self._wrapper.cur_scale) if self.is_scaled else 1.0

    def loss_scale_state(self) -> dict[str, float]:
        """The state of the loss scaler for a checkpoint; empty outside fp16."""
        scaler = self._wrapper.loss_scaler if self.is_scaled else None
        return {name: getattr(scaler, name) for name in SCALER_COUNTERS if hasattr(scaler, name)}

    def restore_loss_scale(self, state: Mapping[str, float]) -> None:
        """Restores `loss_scale_state`, so that a resumed run keeps its scale; ignored by a fixed scale."""
        if self.is_scaled and self._wrapper.loss_scaler.dynamic:
            for name in SCALER_COUNTERS:
                if name in state:
                    setattr(self._wrapper.loss_scaler, name, state[name])

    def sum_over_ranks(self, partial: Partial, tied: Tied) -> None:
        """See `GradientOwner.sum_over_ranks`; here done in every backward pass, before DeepSpeed's hooks run.

        There are no stages, and so no tied weights.
        """
        sum_in_backward(partial)

    def gradient_stats(
        self, layers: Sequence[str], measures: Collection[str], trained: Sequence[nn.Parameter], mesh: ParallelMesh
    ) -> GradientStats | None:
        """Measures the gradients of each step; None without measures, or if DeepSpeed holds the gradients."""
        return None

    def set_before_reduce(self, hook: BucketHook) -> None:  # noqa: B027  (DeepSpeed has no such hook)
        """Sets a hook for the next step: it receives this rank's gradients before the sum over ranks, if possible."""

    def product_adder(self, dtype: torch.dtype) -> AddProduct | None:
        """See `GradientSum.product_adder`; None if DeepSpeed holds the sums."""
        return None

    @abstractmethod
    def guard(self, gate: UpdateGate) -> None:
        """Makes the gate decide on every update."""


def loss_scale_of(scaler: Any, device: torch.device) -> LossScale:
    """A loss scale that continues from the state of DeepSpeed's scaler."""
    if not scaler.dynamic:
        return LossScale(scaler.cur_scale, None, device)
    rule = ScaleRule(scaler.scale_window, scaler.delayed_shift, scaler.min_scale, scaler.consecutive_hysteresis)
    return LossScale(scaler.cur_scale, rule, device)
