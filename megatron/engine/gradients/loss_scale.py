"""The dynamic loss scale of fp16, kept on the device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ScaleRule:
    """The update rule of a loss scale.

    Attributes:
        window: steps without an overflow after which it doubles.
        hysteresis: overflows after which it halves.
        least: its lower bound.
        refills: each step without an overflow restores the hysteresis; if False, only doubling does.
    """

    window: int
    hysteresis: int
    least: float
    refills: bool


class LossScale:
    """The factor of the loss that keeps small gradients from underflowing in fp16.

    The scale and its counters are on the device, so the host waits neither for overflows nor for the next scale.

    Args:
        value: the initial scale.
        rule: changes the scale; None for a fixed scale.

    Attributes:
        value: the scale, always in the same memory. Shapes: `[]` float32.

    Source: DeepSpeed `runtime/fp16/loss_scaler.py`, `DynamicLossScaler`.
    """

    def __init__(self, value: float, rule: ScaleRule | None, device: torch.device) -> None:
        self.value = torch.full((), value, dtype=torch.float32, device=device)
        self._rule = rule
        self._steps = 0
        if rule is not None:
            # good steps until it doubles, starting with a full window, and overflows until it halves
            self._remaining = torch.full((), rule.window, dtype=torch.int64, device=device)
            self._hysteresis = torch.full((), rule.hysteresis, dtype=torch.int64, device=device)
            self._halved, self._kept = (torch.full((), factor, device=device) for factor in (0.5, 1.0))
            self._doubled = torch.full((), 2.0, device=device)

    def update(self, overflows: torch.Tensor) -> None:
        """Updates the scale after a step, without waiting for the device.

        Shapes: overflows `[]` bool.
        """
        self._steps += 1
        rule = self._rule
        if rule is None:
            return
        halves, doubles = self._hysteresis <= 1, self._remaining == 0
        factor = torch.where(
            overflows, torch.where(halves, self._halved, self._kept), torch.where(doubles, self._doubled, self._kept)
        )
        self.value.mul_(factor).clamp_(min=rule.least)
        refilled = torch.full_like(self._hysteresis, rule.hysteresis) if rule.refills else self._hysteresis
        refilled = refilled.masked_fill(doubles, rule.hysteresis)
        self._hysteresis.copy_(torch.where(overflows, (self._hysteresis - 1).clamp(min=1), refilled))
        self._remaining.copy_(((self._remaining - 1) % rule.window).masked_fill(overflows, rule.window))

    def counters(self) -> dict[str, float]:
        """The state for a checkpoint, by DeepSpeed's names; waits for the device."""
        if self._rule is None:
            return {"cur_scale": float(self.value)}
        since_overflow = self._rule.window - int(self._remaining)  # or since it last doubled
        return {
            "cur_scale": float(self.value),
            "cur_iter": self._steps,
            "last_overflow_iter": self._steps - since_overflow - 1,
            "cur_hysteresis": int(self._hysteresis),
        }

    def restore(self, counters: Mapping[str, float]) -> None:
        """Restores the result of `counters`, or DeepSpeed's; leaves missing entries, and a fixed scale, as they are."""
        if self._rule is None:
            return
        self.value.fill_(counters.get("cur_scale", float(self.value)))
        self._steps = int(counters.get("cur_iter", self._steps))
        if "last_overflow_iter" in counters:
            since_overflow = self._steps - int(counters["last_overflow_iter"]) - 1
            self._remaining.fill_(-since_overflow % self._rule.window if since_overflow else self._rule.window)
        self._hysteresis.fill_(int(counters.get("cur_hysteresis", int(self._hysteresis))))
