"""Schedule-free AdamW: averaging of iterates instead of a decaying learning rate.

It has three sequences: the iterates z of AdamW; their average x, for evaluation, which weights each z by a power of its
learning rate; and the trained weights y = (1 - β₁) z + β₁ x, at which gradients are computed. With g the gradient
divided by the root of its second moment, plus λ y, and c the weight of the newest z in the average,

    z ← z - γ g        x ← (1 - c) x + c z

The optimizer's tensors hold y. Its state holds the distance d = z - y in place of momentum; d is 0 before the first
update and after loading only weights. A step is

    d ← d - β₁ γ g        y ← y - (1 - β₁) γ g + c d        d ← (1 - c) d

and x = y - (1 - β₁) / β₁ d, so the average takes no memory.

Source: Defazio et al., "The road less scheduled", 2024 (arXiv 2405.15682), algorithm 1. As in the authors' code, γ is
not bias-corrected, and the second moment is corrected as in AdamW.
"""

from __future__ import annotations

import types
from collections.abc import Sequence
from typing import Any

import torch

from megatron.engine.optimizers.adam import scale_epsilon
from megatron.engine.optimizers.averages import AveragedWeights
from megatron.engine.optimizers.plan import OptimizerPlan
from megatron.kernels.choice import Implementation
from megatron.kernels.optimizer import count_updates, unless_skipped

_LEAST = 1e-300  # avoids division by zero while no learning rate has been above 0


class ScheduleFree(torch.optim.Optimizer):
    """Schedule-free AdamW; element-wise, so its tensors may be parts of parameters.

    A step is skipped if `found_inf` is set, as by `torch.amp.GradScaler`, and not 0; else it overwrites gradients.

    Args:
        groups: each with its `params`, `weight_decay` and `eps`.
        betas: the weight of the average in the trained weights, and the decay of the second moment.
        power: the exponent of the learning rate in the weight of an iterate.
    """

    can_skip = True

    def __init__(self, groups: list[dict[str, Any]], lr: float, betas: tuple[float, float], power: float = 2.0) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": 1e-8, "weight_decay": 0.0})
        self._power = power

    def weight_of(self, rate: float) -> float:
        """The weight of an iterate with this learning rate in the average."""
        return float(rate**self._power)

    def resume(self, tensor: torch.Tensor, weight: float) -> None:
        """Sets the total weight of a tensor's iterates so far."""
        self._state_of(tensor)["weight"].fill_(weight)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        skip: torch.Tensor | None = getattr(self, "found_inf", None)
        for group in self.param_groups:
            if weights := [weight for weight in group["params"] if weight.grad is not None]:
                self._update(group, weights, skip)

    def _update(self, group: dict[str, Any], weights: Sequence[torch.Tensor], skip: torch.Tensor | None) -> None:
        states = [self._state_of(weight) for weight in weights]
        distances, squares = ([state[name] for state in states] for name in ("distance", "exp_avg_sq"))
        share, correction = self._count(group, states, skip)
        average_weight, decay = group["betas"]
        gradients = [weight.grad.to(weight.dtype) for weight in weights]  # type: ignore[union-attr]
        if skip is not None:
            for gradient in gradients:
                gradient.masked_fill_(skip != 0, 0.0)
        torch._foreach_mul_(squares, unless_skipped(skip, decay, 1.0))
        torch._foreach_addcmul_(squares, gradients, gradients, value=1.0 - decay)
        roots = torch._foreach_div(squares, correction)
        torch._foreach_sqrt_(roots)
        torch._foreach_add_(roots, group["eps"])
        torch._foreach_div_(gradients, roots)
        del roots  # a tensor as large as the weights
        torch._foreach_add_(gradients, list(weights), alpha=group["weight_decay"])
        torch._foreach_mul_(gradients, unless_skipped(skip, -group["lr"], 0.0))
        torch._foreach_add_(distances, gradients, alpha=average_weight)
        torch._foreach_add_(list(weights), gradients, alpha=1.0 - average_weight)
        moved = torch._foreach_mul(distances, share)
        torch._foreach_add_(list(weights), moved)
        torch._foreach_sub_(distances, moved)

    def _count(
        self, group: dict[str, Any], states: Sequence[dict[str, Any]], skip: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Counts an update of a group; returns the weight of the newest iterate in the average, 0 if the update is
        skipped, and the bias correction of the second moment.

        Shapes: both `[]` float32.
        """
        steps, totals = ([state[name] for state in states] for name in ("step", "weight"))
        # Uses the learning rate without the group's factor, as `Engine` does for checkpoints; the average is the same.
        weight = torch.full_like(totals[0], self.weight_of(group["lr"] / group.get("lr_multiplier", 1.0)))
        if skip is not None:
            weight.masked_fill_(skip != 0, 0.0)
        torch._foreach_add_(totals, weight)
        torch._foreach_add_(steps, unless_skipped(skip, 1.0, 0.0))
        correction = 1.0 - group["betas"][1] ** steps[0].double()
        share = weight / totals[0].clamp(min=_LEAST)
        return share.float(), correction.masked_fill(steps[0] == 0, 1.0).float()

    def _state_of(self, weight: torch.Tensor) -> dict[str, Any]:
        state: dict[str, Any] = self.state[weight]
        for name in ("distance", "exp_avg_sq"):
            if state.get(name) is None:
                state[name] = torch.zeros_like(weight)
        if state.get("step") is None:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
        if state.get("weight") is None:
            state["weight"] = torch.zeros((), dtype=torch.float64, device=weight.device)
        return state


class IterateMeans(AveragedWeights):
    """The averages x of an optimizer, computed on demand.

    Args:
        masters: the tensors that the optimizer updates, flat or not.
    """

    is_kept = False

    def __init__(self, optimizer: ScheduleFree, masters: Sequence[torch.Tensor]) -> None:
        self._optimizer, self._masters = optimizer, list(masters)
        self._trained: list[torch.Tensor] = []

    @property
    def means(self) -> Sequence[torch.Tensor]:
        """The memory of the averages: none, except the saved weights during an exchange."""
        return self._trained

    @torch.no_grad()
    def of(self, master: torch.Tensor, first: int, count: int) -> torch.Tensor:
        weights = master.detach().view(-1).narrow(0, first, count)
        distance = self._optimizer.state.get(master, {}).get("distance")
        if distance is None:
            return weights
        beta1 = self._optimizer.defaults["betas"][0]
        return torch.sub(weights, distance.view(-1).narrow(0, first, count), alpha=(1.0 - beta1) / beta1)

    def restart(self) -> None:
        """Does nothing: without optimizer state, the averages are the weights."""

    def update(self, is_applied: torch.Tensor) -> None:
        """Does nothing: the optimizer updates them."""

    @torch.no_grad()
    def exchange(self) -> None:
        """Copies the weights and replaces them by their averages, or restores them bit by bit from the copy."""
        if self._trained:
            torch._foreach_copy_(self._masters, self._trained)
            self._trained = []
            return
        self._trained = [master.detach().clone() for master in self._masters]
        for master in self._masters:
            master.view(-1).copy_(self.of(master, 0, master.numel()))


class ScheduleFreePlan(OptimizerPlan[ScheduleFree]):
    """Schedule-free AdamW."""

    moments = types.MappingProxyType({"exp_avg": "distance", "exp_avg_sq": "exp_avg_sq"})

    def build(self, groups: list[dict[str, Any]], implementation: Implementation) -> ScheduleFree:
        optim = self.optim
        scale_epsilon(optim, groups)
        betas = (optim.adam_beta1, optim.adam_beta2)
        return ScheduleFree(groups, optim.lr or 0.0, betas, optim.schedule_free_weight_lr_power)

    def averages(self, optimizer: ScheduleFree, masters: Sequence[torch.Tensor]) -> IterateMeans:
        return IterateMeans(optimizer, masters)

    def weight_of(self, optimizer: ScheduleFree, learning_rate: float) -> float:
        return optimizer.weight_of(learning_rate)

    def resume(self, optimizer: ScheduleFree, master: torch.Tensor, updates: int, weight: float) -> None:
        count_updates(optimizer, master, updates)
        optimizer.resume(master, weight)
