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
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from megatron.device import HostCopy
from megatron.engine.gradients.loss_scale import LossScale
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import all_reduce_max

WINDOW_STEPS = 128
LEAST_STEPS = 32


class UpdateDecision(Enum):
    """What becomes of the update of a step."""

    APPLIED = "applied"
    OVERFLOW = "a gradient overflowed in fp16, and the loss scale falls"
    NOT_FINITE = "loss or gradient norm is not finite"
    SPIKE = "loss or gradient norm is far above the recent ones"
    EMPTY = "no token of the batch counts in the loss"


@dataclass(frozen=True)
class StepChecks:
    """What is looked at in every step beside its loss and gradient norm.

    Attributes:
        skip_spikes: standard deviations above the recent mean from which a step is not applied; None for no limit.
        measures: what is measured of gradients, see `GradientStats`.
        locates_nonfinite: each rank checks its own loss and gradients for NaN and infinity before they are reduced.
    """

    skip_spikes: float | None = None
    measures: Collection[str] = ()
    locates_nonfinite: bool = False


NO_CHECKS = StepChecks()


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


class StepVerdict:
    """What became of the update of a step; the first read may wait for the device.

    Args:
        settle: makes the gate give a verdict, and those before it, their values.
    """

    def __init__(self, settle: Callable[[StepVerdict], None]) -> None:
        self._settle = settle
        self._decision: UpdateDecision | None = None
        self._bad_steps = 0

    @property
    def decision(self) -> UpdateDecision | None:
        """What was decided; None if nothing has been."""
        if self._decision is None:
            self._settle(self)
        return self._decision

    @property
    def is_dropped(self) -> bool:
        return self.decision not in (None, UpdateDecision.APPLIED)

    @property
    def is_bad(self) -> bool:
        """Whether it was dropped because of its loss or gradient."""
        return self.is_dropped and self._decision not in (UpdateDecision.EMPTY, UpdateDecision.OVERFLOW)

    @property
    def is_overflow(self) -> bool:
        """Whether it was dropped because an fp16 gradient overflowed, which the loss scale is there to find out."""
        return self.decision is UpdateDecision.OVERFLOW

    @property
    def consecutive_bad(self) -> int:
        """How many steps in a row were dropped, this one included; 0 if it was not.

        An overflow in fp16, and a step without a counted token, are not among them, and do not end the row either.
        """
        return self._bad_steps if self.is_bad else 0

    def give(self, decision: UpdateDecision, bad_steps: int) -> None:
        self._decision, self._bad_steps = decision, bad_steps


class UpdateCount:
    """The updates that were applied, and the sum of their weights in a mean of the iterates.

    Steps are counted as the host learns of their verdicts, on which reading may have to wait for the device.
    """

    def __init__(self) -> None:
        self._uncounted: deque[tuple[StepVerdict, float]] = deque()
        self._updates, self._weight = 0, 0.0

    def add(self, verdict: StepVerdict, weight: float, in_flight: int) -> None:
        """Adds a step; the latest ones in flight are counted later."""
        self._uncounted.append((verdict, weight))
        self._count(in_flight)

    def read(self) -> tuple[int, float]:
        """Both."""
        self._count(0)
        return self._updates, self._weight

    def restart(self, updates: int, weight: float) -> None:
        """Sets both, as a checkpoint says."""
        self._uncounted.clear()
        self._updates, self._weight = updates, weight

    def _count(self, in_flight: int) -> None:
        while len(self._uncounted) > in_flight:
            verdict, weight = self._uncounted.popleft()
            if not verdict.is_dropped:
                self._updates += 1
                self._weight += weight


class UpdateGate:
    """Takes the decision on each update, for `OptimizerView.guard`.

    On a GPU the host would have to wait for the gradients in order to decide. Where nothing but the step's own figures
    matters, the decision is therefore taken on the device, and the host learns of it when it asks for a verdict.

    Args:
        mesh: all its ranks take the same decision.
        spike_deviations: standard deviations above the recent mean from which a step is dropped, which is decided on
            the host; None for no limit.
        allows_overflow: in fp16 a gradient that is not finite is expected, and only means that the loss scale falls.
        on_device: whether the optimizer can be told by a flag on the device to change nothing.
    """

    def __init__(
        self, mesh: ParallelMesh, *, spike_deviations: float | None, allows_overflow: bool, on_device: bool = False
    ) -> None:
        self._mesh = mesh
        self._spike_deviations = spike_deviations
        self._allows_overflow = allows_overflow
        self._is_on_device = on_device and spike_deviations is None
        self._recent = RecentSteps()
        self._figures: Callable[[], torch.Tensor] | None = None
        self._pending: deque[tuple[StepVerdict, HostCopy]] = deque()
        self._bad_steps = 0
        self._skip: torch.Tensor | None = None
        self._sides = torch.eye(2, dtype=torch.float64, device=mesh.device).unbind()
        self._one = torch.ones((), dtype=torch.float64, device=mesh.device)
        self.verdict = StepVerdict(self.settle)

    @property
    def steps_in_flight(self) -> int:
        """Of how many of the latest steps the host does not know the verdict unless it waits."""
        return int(self._is_on_device)

    @property
    def in_bad_streak(self) -> bool:
        """Whether no good step has followed the last bad one, so that the weights may be to blame."""
        self.settle()
        return self._bad_steps > 0

    def expect(self, figures: Callable[[], torch.Tensor]) -> StepVerdict:
        """Begins a step; returns its verdict, which has a decision when the update is over.

        Args:
            figures: what the step is judged by: the norm of its gradient, the sum of the losses of its global batch and
                the number of tokens that count in it. Called once, when the gradients are complete. Collective.
                `[3]` float64.
        """
        self._figures = figures
        self.verdict = StepVerdict(self.settle)
        return self.verdict

    def to_json(self) -> dict[str, list[float]]:
        """What decisions depend on besides the step itself, for a checkpoint; entries that say nothing are left out."""
        self.settle()
        stored = {} if self._spike_deviations is None else self._recent.to_json()
        return {**stored, **({"bad_in_a_row": [float(self._bad_steps)]} if self._bad_steps else {})}

    def restore(self, stored: Mapping[str, Sequence[float]]) -> None:
        """Continues with what `to_json` returned."""
        self.settle()
        self._recent.restore(stored)
        self._bad_steps = int(sum(stored.get("bad_in_a_row", ())))

    def settle(self, last: StepVerdict | None = None) -> None:
        """Waits for the decisions that were taken on the device, until that on one step; on all by default."""
        verdict = None
        while self._pending and (last is None or verdict is not last):
            verdict, figures = self._pending.popleft()
            self._judge(verdict, figures.read().tolist())

    def may_update(self) -> bool:
        """Whether this rank, which is about to update, may; the first call of a step is collective over all ranks."""
        self._decide(is_before_update=True)
        return self.verdict.decision is UpdateDecision.APPLIED

    def update(self, update: Callable[..., None], loss_scale: LossScale | None = None) -> bool:
        """Updates if all ranks may; once a step, collective over all ranks. Returns whether it was done, or left to the
        device.

        Args:
            update: `megatron.kernels.optimizer.update` of an optimizer. Where the device decides it is given `skip`.
            loss_scale: learns whether the gradients overflowed.
        """
        if self._is_on_device or loss_scale is not None:
            agreed = self._agreed(is_before_update=True)
            if loss_scale is not None:
                loss_scale.update(agreed[0] > 0)
            if self._is_on_device:
                self._pending.append((self.verdict, HostCopy(agreed)))
                wrong, *_, tokens = agreed.unbind()
                self._skip = torch.where(tokens == 0, self._one, wrong).to(torch.float32)
                update(skip=self._skip)
                return True
            self._judge(self.verdict, agreed.tolist())
        else:
            self._judge(self.verdict, self._agreed_on_host(is_before_update=True))
        if self.verdict.is_dropped:
            return False
        update()
        return True

    def is_applied(self) -> torch.Tensor:
        """Whether the update of the last step was applied; without waiting for the device.

        Shapes: result `[]` bool.
        """
        if self._skip is not None:
            return self._skip == 0
        return torch.full((), not self.verdict.is_dropped, device=self._mesh.device)

    def missed_update(self) -> bool:
        """Whether this rank's optimizer dropped a step that others were about to apply; collective if `may_update` was
        not called in it: DeepSpeed's optimizer may have dropped the step already, and that on some ranks only.
        """
        return self._decide(is_before_update=False)

    def _agreed(self, *, is_before_update: bool) -> torch.Tensor:
        """Whether a figure of some rank is wrong, whether some rank is about to update, whether one is not, and the
        largest norm, loss sum and number of tokens; collective over all ranks.

        Shapes: result `[6]` float64.
        """
        own = self._own_figures()
        finite = own.nan_to_num(0.0, 0.0, 0.0)
        is_wrong = (own != finite).any(dim=0, keepdim=True)
        side = self._sides[0 if is_before_update else 1]
        return all_reduce_max(torch.cat([is_wrong, side, finite]), self._mesh.world)

    def _agreed_on_host(self, *, is_before_update: bool) -> Sequence[float]:
        """The same as numbers, for which the host waits; where there is one rank, it computes them itself."""
        if self._mesh.world.size > 1:
            return self._agreed(is_before_update=is_before_update).tolist()  # type: ignore[no-any-return]
        own = self._own_figures().tolist()
        finite = [figure if math.isfinite(figure) else 0.0 for figure in own]
        return [float(own != finite), float(is_before_update), float(not is_before_update), *finite]

    def _own_figures(self) -> torch.Tensor:
        figures, self._figures = self._figures, None
        return figures()  # type: ignore[misc]

    def _decide(self, *, is_before_update: bool) -> bool:
        """Decides, unless that has happened; returns whether others update and this rank does not."""
        if self._figures is None:
            return False
        agreed = self._agreed_on_host(is_before_update=is_before_update)
        self._judge(self.verdict, agreed)
        return bool(agreed[1]) and not self.verdict.is_overflow and not is_before_update

    def _judge(self, verdict: StepVerdict, agreed: Sequence[float]) -> None:
        wrong, _, dropped, norm, loss_sum, tokens = agreed
        if (wrong or dropped) and self._allows_overflow:
            verdict.give(UpdateDecision.OVERFLOW, self._bad_steps)
            return
        limit, loss = self._spike_deviations, loss_sum / tokens if tokens else loss_sum
        if wrong or dropped:
            decision = UpdateDecision.NOT_FINITE
        elif tokens == 0:  # says nothing of the steps before it: bad ones stay in a row
            verdict.give(UpdateDecision.EMPTY, self._bad_steps)
            return
        elif limit is not None and self._recent.is_spike(loss, norm, limit):
            decision = UpdateDecision.SPIKE
        else:
            decision = UpdateDecision.APPLIED
            self._recent.add(loss, norm)
        self._bad_steps = 0 if decision is UpdateDecision.APPLIED else self._bad_steps + 1
        verdict.give(decision, self._bad_steps)


def _limit(values: Sequence[float] | deque[float], deviations: float) -> float:
    """This many sample standard deviations above the mean; infinite with few values, or where all are the same."""
    if len(values) < LEAST_STEPS:
        return math.inf
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean + deviations * deviation if deviation > 0 else math.inf
