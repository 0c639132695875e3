"""Decides before each optimizer update whether it is applied, on all ranks alike.

A loss or gradient that is NaN or infinite would spoil weights and moments for good, and one far above the usual sets
training back. Such a step is dropped as a whole: no weight, moment or count of Adam's changes. A step whose batch has
no token that counts in the loss has no gradient to learn from, but Adam's moments and the weight decay would still
change the weights: it is dropped as well, and is not a bad one. DeepSpeed drops some such steps itself, depending on
the ZeRO stage, and one of its optimizers decides on the ranks of one data-parallel replica only; so the decision is
taken here.

Source: the idea of skipping steps by the spread of recent ones: allenai/OLMo-core, optim/skip_step_optimizer.py.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import NamedTuple

import torch

from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max

WINDOW_STEPS = 128
LEAST_STEPS = 32


class UpdateDecision(Enum):
    """What becomes of the update of a step."""

    APPLIED = "applied"
    NOT_FINITE = "loss or gradient norm is not finite"
    SPIKE = "loss or gradient norm is far above the recent ones"
    EMPTY = "no token of the batch counts in the loss"


class StepFigures(NamedTuple):
    """What a step is judged by.

    Shapes: each `[]`.

    Attributes:
        loss: mean loss of the global batch.
        gradient_norm: the norm of its gradient.
        token_count: its tokens that count in the loss.
    """

    loss: torch.Tensor
    gradient_norm: torch.Tensor
    token_count: torch.Tensor


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
        """Whether one of the two is more than this many standard deviations above its mean; False with few steps."""
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
    """Takes the decision on each update, for `OptimizerView.guard`.

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
        self._figures: Callable[[], StepFigures] | None = None
        self.decision: UpdateDecision | None = None
        self._bad_steps = 0

    def expect(self, figures: Callable[[], StepFigures]) -> None:
        """Forgets the decision of the last step.

        Args:
            figures: called once, when the gradients of the step are complete. Collective.
        """
        self._figures = figures
        self.decision = None

    @property
    def is_dropped(self) -> bool:
        """Whether the update of the last step was dropped."""
        return self.decision not in (None, UpdateDecision.APPLIED)

    @property
    def is_bad(self) -> bool:
        """Whether it was dropped because of its loss or gradient."""
        return self.is_dropped and self.decision is not UpdateDecision.EMPTY

    @property
    def bad_in_a_row(self) -> int:
        """How many steps in a row were dropped, the last one included; 0 if it was not.

        An overflow in fp16, and a step without a counted token, are not among them, and do not end the row either.
        """
        return self._bad_steps if self.is_bad else 0

    @property
    def has_open_row(self) -> bool:
        """Whether no good step has followed the last bad one, so that the weights may be to blame."""
        return self._bad_steps > 0

    def to_json(self) -> dict[str, list[float]]:
        """What decisions depend on besides the step itself, for a checkpoint; entries that say nothing are left out."""
        stored = {} if self._spike_deviations is None else self._recent.to_json()
        return {**stored, **({"bad_in_a_row": [float(self._bad_steps)]} if self._bad_steps else {})}

    def restore(self, stored: Mapping[str, Sequence[float]]) -> None:
        """Continues with what `to_json` returned."""
        self._recent.restore(stored)
        self._bad_steps = int(sum(stored.get("bad_in_a_row", ())))

    def may_update(self) -> bool:
        """Whether this rank, which is about to update, may; the first call of a step is collective over all ranks."""
        self._decide(is_before_update=True)
        return self.decision is UpdateDecision.APPLIED

    def is_left_behind(self) -> bool:
        """Whether this rank's optimizer dropped a step that others were about to apply; collective if `may_update` was
        not called in it: DeepSpeed's optimizer may have dropped the step already, and that on some ranks only.
        """
        return self._decide(is_before_update=False)

    def _decide(self, *, is_before_update: bool) -> bool:
        """Decides, unless that has happened; returns whether others update and this rank does not."""
        if self.decision is not None or self._figures is None:
            return False
        own = torch.stack(self._figures()).to(torch.float64)
        is_wrong = (~own.isfinite()).any().to(own).reshape(1)
        sides = own.new_tensor([is_before_update, not is_before_update])
        agreed = all_reduce_max(torch.cat([is_wrong, sides, own.nan_to_num(0.0, 0.0, 0.0)]), self._mesh.world)
        *flags, loss, norm, tokens = agreed.tolist()
        some_wrong, some_update, some_dropped = map(bool, flags)
        if self._allows_overflow and (some_wrong or some_dropped):
            self.decision = UpdateDecision.APPLIED
            return False
        self._judge(some_wrong or some_dropped, loss, norm, is_empty=tokens == 0)
        return some_update and not is_before_update

    def _judge(self, is_wrong: bool, loss: float, norm: float, *, is_empty: bool) -> None:
        limit = self._spike_deviations
        if is_wrong:
            self.decision = UpdateDecision.NOT_FINITE
        elif is_empty:
            self.decision = UpdateDecision.EMPTY  # says nothing of the steps before it: bad ones stay in a row
            return
        elif limit is not None and self._recent.is_spike(loss, norm, limit):
            self.decision = UpdateDecision.SPIKE
        else:
            self.decision = UpdateDecision.APPLIED
            self._recent.add(loss, norm)
        self._bad_steps = self._bad_steps + 1 if self.is_bad else 0


def _limit(values: Sequence[float] | deque[float], deviations: float) -> float:
    """This many sample standard deviations above the mean; infinite with few values, or where all are the same."""
    if len(values) < LEAST_STEPS:
        return math.inf
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean + deviations * deviation if deviation > 0 else math.inf
