"""Decides before each optimizer update whether it is applied, on all ranks alike.

A loss or gradient that is NaN or infinite would spoil weights and moments for good, and one far above the usual sets
training back. Such a step is dropped as a whole: no weight, moment or count of Adam's changes. DeepSpeed drops some
such steps itself, depending on the ZeRO stage, and one of its optimizers decides on the ranks of one data-parallel
replica only; so the decision is taken here.

Source: the idea of skipping steps by the spread of recent ones: allenai/OLMo-core, optim/skip_step_optimizer.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max

WINDOW_STEPS = 128
LEAST_STEPS = 32


class Decision(Enum):
    """What becomes of the update of a step."""

    APPLIED = "applied"
    NOT_FINITE = "loss or gradient norm is not finite"
    SPIKE = "loss or gradient norm is far above the recent ones"


class RecentSteps:
    """Loss and gradient norm of the latest steps that were applied."""

    def __init__(self) -> None:
        self._figures: dict[str, deque[float]] = {
            name: deque(maxlen=WINDOW_STEPS) for name in ("loss", "gradient_norm")
        }

    def add(self, loss: float, gradient_norm: float) -> None:
        """Adds a step."""
        self._figures["loss"].append(loss)
        self._figures["gradient_norm"].append(gradient_norm)

    def is_spike(self, loss: float, gradient_norm: float, deviations: float) -> bool:
        """Whether one of the two is more than so many standard deviations above its mean; False with few steps."""
        pairs = zip((loss, gradient_norm), self._figures.values(), strict=True)
        return any(value > _limit(known, deviations) for value, known in pairs)

    def to_json(self) -> dict[str, list[float]]:
        """The values by name, oldest first."""
        return {name: list(values) for name, values in self._figures.items()}

    def restore(self, stored: Mapping[str, Sequence[float]]) -> None:
        """Continues with what `to_json` returned."""
        for name, values in self._figures.items():
            values.clear()
            values.extend(stored.get(name, ()))


class UpdateGate:
    """Stands in front of the `step` of the torch optimizer that DeepSpeed wraps.

    Args:
        mesh: all its ranks take the same decision.
        spike_deviations: standard deviations above the recent mean from which a step is dropped; None for no limit.
        allows_overflow: in fp16 a gradient that is not finite is expected, and the loss scaler's business.
    """

    def __init__(self, mesh: ParallelMesh, *, spike_deviations: float | None, allows_overflow: bool) -> None:
        self._mesh = mesh
        self._spike_deviations = spike_deviations
        self._allows_overflow = allows_overflow
        self._recent = RecentSteps()
        self._figures: Callable[[], tuple[torch.Tensor, torch.Tensor]] | None = None
        self.decision: Decision | None = None
        self.bad_in_a_row = 0

    def guard(self, wrapper: Any, optimizer: torch.optim.Optimizer) -> None:
        """Puts the gate in front of an optimizer.

        Args:
            wrapper: DeepSpeed's optimizer around it, or itself.
        """
        update, step = optimizer.step, wrapper.step

        def gated_update(*arguments: Any, **options: Any) -> Any:
            self._decide(is_before_update=True)
            return update(*arguments, **options) if self.decision is Decision.APPLIED else None

        def settled_step(*arguments: Any, **options: Any) -> Any:
            result = step(*arguments, **options)
            others_continue = self._decide(is_before_update=False)
            if others_continue:
                # They gather the weights that the ranks have updated: a collective that this rank must join.
                wrapper.update_lp_params()
            return result

        optimizer.step = gated_update  # type: ignore[method-assign]
        if wrapper is not optimizer:
            wrapper.step = settled_step

    def expect(self, figures: Callable[[], tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Forgets the decision of the last step.

        Args:
            figures: called once, when the gradients of the step are complete; returns the mean loss of the global batch
                and the norm of its gradient. Collective.
        """
        self._figures = figures
        self.decision = None

    @property
    def is_bad(self) -> bool:
        """Whether the last step was dropped."""
        return self.decision not in (None, Decision.APPLIED)

    def to_json(self) -> dict[str, list[float]]:
        """What decisions depend on beside the step itself, for a checkpoint; entries that say nothing are left out."""
        stored = {} if self._spike_deviations is None else self._recent.to_json()
        return {**stored, **({"bad_in_a_row": [float(self.bad_in_a_row)]} if self.bad_in_a_row else {})}

    def restore(self, stored: Mapping[str, Sequence[float]]) -> None:
        """Continues with what `to_json` returned."""
        self._recent.restore(stored)
        self.bad_in_a_row = int(sum(stored.get("bad_in_a_row", ())))

    def _decide(self, *, is_before_update: bool) -> bool:
        """Decides, unless that has happened; collective over all ranks, and the first to need the figures on the host.

        Args:
            is_before_update: whether this rank was about to update. DeepSpeed's optimizer may have dropped the step
                already, and that on some ranks only.

        Returns:
            whether this rank dropped the step while others were about to update.
        """
        if self.decision is not None or self._figures is None:
            return False
        loss, norm = self._figures()
        own = torch.stack([loss, norm]).to(torch.float64)
        is_wrong = (~own.isfinite()).any().to(own).reshape(1)
        sides = own.new_tensor([is_before_update, not is_before_update])
        agreed = all_reduce_max(torch.cat([is_wrong, sides, own.nan_to_num(0.0, 0.0, 0.0)]), self._mesh.world)
        *flags, agreed_loss, agreed_norm = agreed.tolist()
        some_wrong, some_update, some_dropped = map(bool, flags)
        if self._allows_overflow and (some_wrong or some_dropped):
            self.decision = Decision.APPLIED
            return False
        self._judge(some_wrong or some_dropped, agreed_loss, agreed_norm)
        return some_update and not is_before_update

    def _judge(self, is_wrong: bool, loss: float, norm: float) -> None:
        limit = self._spike_deviations
        if is_wrong:
            self.decision = Decision.NOT_FINITE
        elif limit is not None and self._recent.is_spike(loss, norm, limit):
            self.decision = Decision.SPIKE
        else:
            self.decision = Decision.APPLIED
            self._recent.add(loss, norm)
        self.bad_in_a_row = self.bad_in_a_row + 1 if self.is_bad else 0


def _limit(values: Sequence[float] | deque[float], deviations: float) -> float:
    """So many sample standard deviations above the mean; infinite with few values, or where all are the same."""
    if len(values) < LEAST_STEPS:
        return math.inf
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean + deviations * deviation if deviation > 0 else math.inf
