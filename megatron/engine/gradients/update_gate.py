"""Decides before each optimizer update whether to apply or skip it, on all ranks alike.

A NaN or infinite loss or gradient would ruin weights and moments permanently, and a spike sets training back. Such bad
steps are skipped as a whole: no weight, moment or step count changes. A step without counted tokens is skipped as well,
because Adam's moments and weight decay would still change the weights, but it is not a bad step. DeepSpeed itself
skips only some of these steps, depending on the ZeRO stage, and one of its optimizers agrees only within a single
data-parallel replica; therefore the decision is made here.

Source: skipping steps that deviate from recent ones is from allenai/OLMo-core, optim/skip_step_optimizer.py.
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
    """The decision on the update of a step."""

    APPLIED = "applied"
    OVERFLOW = "a gradient overflowed in fp16, and the loss scale is lowered"
    NOT_FINITE = "loss or gradient norm is not finite"
    SPIKE = "loss or gradient norm is far above the recent ones"
    EMPTY = "no token of the batch counts in the loss"


@dataclass(frozen=True)
class StepChecks:
    """Optional checks of every step.

    Attributes:
        skip_spikes: standard deviations above the recent mean beyond which an update is skipped; None for no limit.
        measures: the gradient statistics, see `GradientStats`.
        locates_nonfinite: each rank checks its own loss and gradients for NaN and infinity before they are reduced.
    """

    skip_spikes: float | None = None
    measures: Collection[str] = ()
    locates_nonfinite: bool = False


NO_CHECKS = StepChecks()


class RecentSteps:
    """Loss and gradient norm of the latest applied steps."""

    def __init__(self) -> None:
        self._values: dict[str, deque[float]] = {name: deque(maxlen=WINDOW_STEPS) for name in ("loss", "gradient_norm")}

    def add(self, loss: float, gradient_norm: float) -> None:
        """Adds a step."""
        self._values["loss"].append(loss)
        self._values["gradient_norm"].append(gradient_norm)

    def is_spike(self, loss: float, gradient_norm: float, deviations: float) -> bool:
        """Returns True if one of the two is more than `deviations` standard deviations above its mean.

        Always False with fewer than `LEAST_STEPS` steps.
        """
        pairs = zip((loss, gradient_norm), self._values.values(), strict=True)
        return any(value > _limit(recent, deviations) for value, recent in pairs)

    def to_json(self) -> dict[str, list[float]]:
        """The values by name, oldest first."""
        return {name: list(values) for name, values in self._values.items()}

    def restore(self, stored: Mapping[str, Sequence[float]]) -> None:
        """Restores the result of `to_json`."""
        for name, values in self._values.items():
            values.clear()
            values.extend(stored.get(name, ()))


class StepVerdict:
    """The decision on the update of a step; the first read may wait for the device.

    Args:
        settle: makes the gate settle this verdict and all earlier ones.
    """

    def __init__(self, settle: Callable[[StepVerdict], None]) -> None:
        self._settle = settle
        self._decision: UpdateDecision | None = None
        self._bad_steps = 0

    @property
    def decision(self) -> UpdateDecision | None:
        """The decision; None before it is made."""
        if self._decision is None:
            self._settle(self)
        return self._decision

    @property
    def is_skipped(self) -> bool:
        return self.decision not in (None, UpdateDecision.APPLIED)

    @property
    def is_bad(self) -> bool:
        """True if it was skipped because of its loss or gradient."""
        return self.is_skipped and self._decision not in (UpdateDecision.EMPTY, UpdateDecision.OVERFLOW)

    @property
    def is_overflow(self) -> bool:
        """True if it was skipped because an fp16 gradient overflowed, a normal event of dynamic loss scaling."""
        return self.decision is UpdateDecision.OVERFLOW

    @property
    def consecutive_bad(self) -> int:
        """Number of consecutive bad steps up to this one; 0 if it is not bad.

        Overflows and steps without counted tokens are not counted, and do not end a streak.
        """
        return self._bad_steps if self.is_bad else 0

    def set(self, decision: UpdateDecision, bad_steps: int) -> None:
        self._decision, self._bad_steps = decision, bad_steps


class UpdateCount:
    """The number of applied updates, and the sum of their weights in an average of iterates.

    A step is counted once its verdict is available to the host; reading may wait for the device.
    """

    def __init__(self) -> None:
        self._uncounted: deque[tuple[StepVerdict, float]] = deque()
        self._updates, self._weight = 0, 0.0

    def add(self, verdict: StepVerdict, weight: float, in_flight: int) -> None:
        """Adds a step; the latest `in_flight` steps are counted later."""
        self._uncounted.append((verdict, weight))
        self._count(in_flight)

    def read(self) -> tuple[int, float]:
        """Returns both."""
        self._count(0)
        return self._updates, self._weight

    def restart(self, updates: int, weight: float) -> None:
        """Sets both to the values of a checkpoint."""
        self._uncounted.clear()
        self._updates, self._weight = updates, weight

    def _count(self, in_flight: int) -> None:
        while len(self._uncounted) > in_flight:
            verdict, weight = self._uncounted.popleft()
            if not verdict.is_skipped:
                self._updates += 1
                self._weight += weight


class UpdateGate:
    """Decides on each update, for `OptimizerView.guard`.

    Waiting for the gradients would stall the host, so a decision that depends only on the values of the step is made on
    the GPU; the host reads it when it reads the verdict.

    Args:
        mesh: all its ranks make the same decision.
        spike_deviations: standard deviations above the recent mean beyond which the host skips an update; None for no
            limit.
        allows_overflow: in fp16, a gradient that is not finite is expected and only lowers the loss scale.
        on_device: a flag on the device can make the optimizer skip an update.
    """

    def __init__(
        self, mesh: ParallelMesh, *, spike_deviations: float | None, allows_overflow: bool, on_device: bool = False
    ) -> None:
        self._mesh = mesh
        self._spike_deviations = spike_deviations
        self._allows_overflow = allows_overflow
        self._is_on_device = on_device and spike_deviations is None
        self._recent = RecentSteps()
        self._measure: Callable[[], torch.Tensor] | None = None
        self._pending: deque[tuple[StepVerdict, HostCopy]] = deque()
        self._bad_steps = 0
        self._skip: torch.Tensor | None = None
        self._sides = torch.eye(2, dtype=torch.float64, device=mesh.device).unbind()
        self._one = torch.ones((), dtype=torch.float64, device=mesh.device)
        self.verdict = StepVerdict(self.settle)

    @property
    def steps_in_flight(self) -> int:
        """Number of latest steps whose verdict the host may have to wait for."""
        return int(self._is_on_device)

    @property
    def in_bad_streak(self) -> bool:
        """True if no good step has followed the last bad one, so that the weights may be at fault."""
        self.settle()
        return self._bad_steps > 0

    def begin(self, measure: Callable[[], torch.Tensor]) -> StepVerdict:
        """Begins a step; returns its verdict, which is decided by the end of the update.

        Args:
            measure: returns gradient norm, loss sum and number of counted tokens of the global batch. Called once, when
                the gradients are complete; collective. `[3]` float64.
        """
        self._measure = measure
        self.verdict = StepVerdict(self.settle)
        return self.verdict

    def to_json(self) -> dict[str, list[float]]:
        """The state of the gate for a checkpoint, without empty entries."""
        self.settle()
        stored = {} if self._spike_deviations is None else self._recent.to_json()
        return {**stored, **({"bad_in_a_row": [float(self._bad_steps)]} if self._bad_steps else {})}

    def restore(self, stored: Mapping[str, Sequence[float]]) -> None:
        """Restores the result of `to_json`."""
        self.settle()
        self._recent.restore(stored)
        self._bad_steps = int(sum(stored.get("bad_in_a_row", ())))

    def settle(self, last: StepVerdict | None = None) -> None:
        """Waits for the decisions made on the device, up to the one on `last`; for all of them by default."""
        verdict = None
        while self._pending and (last is None or verdict is not last):
            verdict, values = self._pending.popleft()
            self._judge(verdict, values.read().tolist())

    def may_update(self) -> bool:
        """Returns True if this rank may update now; the first call of a step is collective over all ranks."""
        self._decide(is_before_update=True)
        return self.verdict.decision is UpdateDecision.APPLIED

    def update(self, update: Callable[..., None], loss_scale: LossScale | None = None) -> bool:
        """Updates if all ranks may; once a step, collective over all ranks.

        Args:
            update: `megatron.kernels.optimizer.update` of an optimizer, called with `skip` if the device decides.
            loss_scale: updated with the overflow of this step.

        Returns:
            False if the update was skipped; True if it was applied, or if the device decides.
        """
        if self._is_on_device or loss_scale is not None:
            agreed = self._agreed(is_before_update=True)
            if loss_scale is not None:
                loss_scale.update(agreed[0] > 0)
            if self._is_on_device:
                self._pending.append((self.verdict, HostCopy(agreed)))
                is_wrong, *_, tokens = agreed.unbind()
                self._skip = torch.where(tokens == 0, self._one, is_wrong).to(torch.float32)
                update(skip=self._skip)
                return True
            self._judge(self.verdict, agreed.tolist())
        else:
            self._judge(self.verdict, self._agreed_on_host(is_before_update=True))
        if self.verdict.is_skipped:
            return False
        update()
        return True

    def is_applied(self) -> torch.Tensor:
        """True if the update of the last step was applied; does not wait for the device. Shapes: result `[]` bool."""
        if self._skip is not None:
            return self._skip == 0
        return torch.full((), not self.verdict.is_skipped, device=self._mesh.device)

    def missed_update(self) -> bool:
        """Returns True if DeepSpeed's optimizer skipped an update on this rank that other ranks apply.

        Collective if this rank has not called `may_update` in the step.
        """
        return self._decide(is_before_update=False)

    def _agreed(self, *, is_before_update: bool) -> torch.Tensor:
        """The maxima over ranks of three flags (a value is not finite, the rank is about to update, it is not) and of
        gradient norm, loss sum and number of tokens; collective over all ranks.

        Shapes: result `[6]` float64.
        """
        values = self._measured()
        finite = values.nan_to_num(0.0, 0.0, 0.0)
        is_wrong = (values != finite).any(dim=0, keepdim=True)
        side = self._sides[0 if is_before_update else 1]
        return all_reduce_max(torch.cat([is_wrong, side, finite]), self._mesh.world)

    def _agreed_on_host(self, *, is_before_update: bool) -> Sequence[float]:
        """`_agreed` on the host, which waits for the device; a single rank also computes it on the host."""
        if self._mesh.world.size > 1:
            return self._agreed(is_before_update=is_before_update).tolist()  # type: ignore[no-any-return]
        values = self._measured().tolist()
        finite = [value if math.isfinite(value) else 0.0 for value in values]
        return [float(values != finite), float(is_before_update), float(not is_before_update), *finite]

    def _measured(self) -> torch.Tensor:
        measure, self._measure = self._measure, None
        return measure()  # type: ignore[misc]

    def _decide(self, *, is_before_update: bool) -> bool:
        """Decides if not yet decided; returns True if other ranks update and this one does not."""
        if self._measure is None:
            return False
        agreed = self._agreed_on_host(is_before_update=is_before_update)
        self._judge(self.verdict, agreed)
        return bool(agreed[1]) and not self.verdict.is_overflow and not is_before_update

    def _judge(self, verdict: StepVerdict, agreed: Sequence[float]) -> None:
        is_wrong, _, is_skipped, norm, loss_sum, tokens = agreed
        if (is_wrong or is_skipped) and self._allows_overflow:
            verdict.set(UpdateDecision.OVERFLOW, self._bad_steps)
            return
        limit, loss = self._spike_deviations, loss_sum / tokens if tokens else loss_sum
        if is_wrong or is_skipped:
            decision = UpdateDecision.NOT_FINITE
        elif tokens == 0:  # neither good nor bad: a streak of bad steps continues
            verdict.set(UpdateDecision.EMPTY, self._bad_steps)
            return
        elif limit is not None and self._recent.is_spike(loss, norm, limit):
            decision = UpdateDecision.SPIKE
        else:
            decision = UpdateDecision.APPLIED
            self._recent.add(loss, norm)
        self._bad_steps = 0 if decision is UpdateDecision.APPLIED else self._bad_steps + 1
        verdict.set(decision, self._bad_steps)


def _limit(values: Sequence[float] | deque[float], deviations: float) -> float:
    """The mean plus this many sample standard deviations; infinite with few values, or if all are equal."""
    if len(values) < LEAST_STEPS:
        return math.inf
    mean = math.fsum(values) / len(values)
    deviation = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))
    return mean + deviations * deviation if deviation > 0 else math.inf
