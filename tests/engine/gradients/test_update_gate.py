"""A step that is bad on one rank is applied on none, nor one without a counted token, in every layout; and what counts
as a spike.
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from megatron.data.loader import Batch
from megatron.engine.buckets.bucket_queue import Buckets
from megatron.engine.deepspeed_internals.optimizer_views import DirectView
from megatron.engine.deepspeed_internals.parameters import mark_parameter
from megatron.engine.engine import Engine
from megatron.engine.gradients.clipping import Clipping
from megatron.engine.gradients.update_gate import (
    LEAST_STEPS,
    WINDOW_STEPS,
    RecentSteps,
    UpdateDecision,
    UpdateGate,
)
from megatron.engine.passes.step_loss import StepLoss
from megatron.engine.state import owned_pieces
from megatron.kernels.optimizer import build_adamw, update
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.shard_spec import shard_spec_of
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.engine_runs import BF16, CHUNKS, RECIPE, stand_in_engine, step_figures
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches

# (tp, pp, dp), then ZeRO stage, further flags, and whether the device decides, of each run
Runs = list[tuple[int, list[str], bool]]
LAYOUTS: dict[str, tuple[tuple[int, int, int], Runs]] = {
    "tp2": ((2, 1, 1), [(0, [], False), (0, [], True), (1, BF16, False), (1, BF16, True)]),
    "dp2": (
        (1, 1, 2),
        [
            *((0, [], False), (0, [], True), (1, [], False), (1, BF16, True)),
            *((1, ["--optimizer", "muon", *BF16], True), (0, ["--optimizer", "lion"], True)),
            (1, ["--optimizer", "schedule-free", *BF16], True),
            *((2, BF16, False), (3, [], False), (3, BF16, False)),
        ],
    ),
    "pp2dp2": ((1, 2, 2), [(0, [], False), (0, [], True), (1, CHUNKS, False), (1, BF16, False), (1, BF16, True)]),
}


def bad_steps(rank: int, layout: tuple[int, int, int], runs: Runs) -> list[list[Any]]:
    """What each step of each run did: steps in a row, updates so far, whether the state changed, updates announced."""
    found = []
    for stage, flags, on_device in runs:
        config = layout_config(RECIPE, layout, stage, flags)
        engine = build_engine(config, open_mesh(config.parallel))
        assert engine.view.can_skip >= on_device and engine.gate.steps_in_flight == 0
        if on_device:  # as on a GPU
            engine.gate = UpdateGate(engine.mesh, spike_deviations=None, allows_overflow=False, on_device=True)
            engine.view.guard(engine.gate)
        announced: list[int] = []
        has_loss: list[bool] = []
        engine.before_update(lambda announced=announced: announced.append(1))
        rows, results = [], []
        for step, spoil in enumerate((_spoil_reduced_gradient, None, _spoil_loss, _spoil_gradient, None, _empty)):
            restore = spoil(engine) if spoil is not None and rank == engine.mesh.world.size - 1 else lambda: None
            before, count = _state(engine), len(announced)
            batches = local_batches(RECIPE, config, engine.mesh, step, False)
            batches = [batch if spoil is not _empty else _without_loss(batch) for batch in batches]
            result = engine.train_batch(batches, 1e-2)
            restore()
            changed = not all(torch.equal(*pair) for pair in zip(before, _state(engine), strict=True))
            assert len(engine._count._uncounted) == on_device  # the host has not asked for the last step's verdict
            results.append(result)
            rows.append((changed, (len(announced) > count) and not on_device, result.skipped))
            has_loss.append(result.loss is not None)
        assert has_loss == [True] * 5 + [False] and engine.evaluate(batches) == (0.0, 0.0)
        found.append([(result.consecutive_bad, *row) for result, row in zip(results, rows, strict=True)])
        assert engine.update_count == 2 and not engine.gate.in_bad_streak
    return found


def _state(engine: Engine) -> list[torch.Tensor]:
    """Copies of masters and moments, and of the weights that the network computes with."""
    weights = [getattr(parameter, "ds_tensor", parameter) for parameter in engine.module.parameters()]
    return [tensor.detach().clone() for tensor in (*(values for _, values in owned_pieces(engine)), *weights)]


def _spoil_loss(engine: Engine) -> Any:
    """Only the reported loss of this rank becomes NaN; its gradients stay as they are."""
    own = StepLoss.loss

    def spoiled(losses: StepLoss, *given: Any, **named: Any) -> torch.Tensor:
        loss = own(losses, *given, **named)
        losses.totals.sums[0] = math.nan
        return loss

    StepLoss.loss = spoiled  # type: ignore[method-assign]
    return lambda: setattr(StepLoss, "loss", own)


def _spoil_gradient(engine: Engine) -> Any:
    """A gradient of this rank becomes infinite before ranks sum it.

    It is one that counts in the norm: that of a tensor-parallel copy does not, but then the copies differ.
    """
    parameter = [each for each in engine.module.parameters() if shard_spec_of(each).is_counted(engine.mesh)][-1]
    return parameter.register_hook(lambda gradient: gradient + math.inf).remove


def _without_loss(batch: Batch) -> Batch:
    return dataclasses.replace(batch, loss_mask=np.zeros_like(batch.loss_mask))


def _empty(engine: Engine) -> Any:
    """No token counts on any rank; what Adam and the weight decay would do anyway is seen."""
    return lambda: None


def _spoil_reduced_gradient(engine: Engine) -> Any:
    """A gradient of this rank becomes NaN after ranks have summed it, so that the other replicas do not see it."""
    place, name = engine.deepspeed.optimizer, "step"
    own = getattr(place, name)

    def spoiled(*given: Any) -> Any:
        next(engine.view.reduced_gradients()).mul_(math.nan)
        return own(*given)

    setattr(place, name, spoiled)
    return lambda: setattr(place, name, own)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LAYOUTS)
def test_a_step_that_is_bad_on_one_rank_is_applied_on_none(name: str) -> None:
    layout, runs = LAYOUTS[name]
    ranks = run_ranks(bad_steps, math.prod(layout), layout, runs)
    for (stage, flags, on_device), *rows in zip(runs, *ranks, strict=True):
        for rank, steps in enumerate(rows):
            told = not on_device  # before a step that the device drops, the work is done as before any other
            expected = [
                (1, False, False, False),
                (0, True, told, False),
                (1, False, False, False),
                (2, False, False, False),
                (0, True, told, False),
                (0, False, False, False),
            ]
            assert steps == expected, (stage, flags, on_device, rank)


def weighted(rate: float = 1.0) -> tuple[torch.optim.Optimizer, torch.nn.Parameter]:
    """An optimizer that can be told by a flag to change nothing, and its weight."""
    weight = torch.nn.Parameter(torch.zeros(3))
    weight.grad = torch.full((3,), -1.0)
    return build_adamw([{"params": [weight], "eps": 1e-8, "weight_decay": 0.0}], lr=rate, betas=(0.9, 0.9)), weight


def test_the_device_decides_only_where_nothing_else_matters() -> None:
    for deviations, allows_overflow, steps in ((3.0, False, 0), (None, False, 1), (None, True, 1)):
        gate = UpdateGate(
            ParallelMesh.single(), spike_deviations=deviations, allows_overflow=allows_overflow, on_device=True
        )
        assert gate.steps_in_flight == steps


def test_verdicts_of_the_device_come_in_order_when_they_are_asked_for() -> None:
    gate = UpdateGate(ParallelMesh.single(), spike_deviations=None, allows_overflow=False, on_device=True)
    assert gate.steps_in_flight == 1
    optimizer, weight = weighted()
    verdicts, changed = [], []
    for loss, norm, tokens in ((2.0, 1.0, 4.0), (math.nan, 1.0, 4.0), (2.0, math.inf, 4.0), (0.0, 0.0, 0.0)):
        before = [weight.detach().clone(), *(value.clone() for value in optimizer.state[weight].values())]
        values = step_figures(loss, norm, tokens)
        verdicts.append(gate.begin(lambda values=values: values))
        assert gate.update(partial(update, optimizer, gradient_factor=torch.tensor(norm))) is True
        after = [weight.detach(), *optimizer.state[weight].values()]
        changed.append(len(before) != len(after) or not all(map(torch.equal, before, after)))
    assert changed == [True, False, False, False]
    assert verdicts[2].consecutive_bad == 2  # asked for before the first
    assert len(gate._pending) == 1  # the last step may still be running
    assert [verdict.decision for verdict in verdicts] == [
        *(UpdateDecision.APPLIED, UpdateDecision.NOT_FINITE, UpdateDecision.NOT_FINITE, UpdateDecision.EMPTY)
    ]
    assert [verdict.consecutive_bad for verdict in verdicts] == [0, 1, 2, 0]
    assert gate.in_bad_streak and gate.to_json() == {"bad_in_a_row": [2.0]}


def filled(count: int) -> RecentSteps:
    """Losses that alternate between 1 and 3 (mean 2), norms ten times as large."""
    recent = RecentSteps()
    for step in range(count):
        recent.add(1.0 + 2.0 * (step % 2), 10.0 + 20.0 * (step % 2))
    return recent


def test_a_spike_is_a_number_of_deviations_above_the_mean() -> None:
    recent, deviation = filled(64), math.sqrt(64 / 63)
    assert not recent.is_spike(2.0 + 2.99 * deviation, 20.0, 3.0)
    assert recent.is_spike(2.0 + 3.01 * deviation, 20.0, 3.0)
    assert not recent.is_spike(2.0, 20.0 + 29.9 * deviation, 3.0)
    assert recent.is_spike(2.0, 20.0 + 30.1 * deviation, 3.0)
    assert not recent.is_spike(-100.0, 0.0, 3.0)


def test_few_or_equal_values_tell_no_spike() -> None:
    assert not filled(LEAST_STEPS - 1).is_spike(1e9, 1e9, 1.0)
    assert filled(LEAST_STEPS).is_spike(1e9, 1e9, 1.0)
    equal = RecentSteps()
    for _ in range(LEAST_STEPS):
        equal.add(2.0, 1.0)
    assert not equal.is_spike(2.1, 1.1, 1.0)


def test_old_steps_are_forgotten() -> None:
    recent = filled(10)
    for step in range(WINDOW_STEPS):
        recent.add(5.0 + 0.1 * (step % 2), 1.0)
    assert recent.is_spike(6.0, 1.0, 3.0)
    assert len(recent.to_json()["loss"]) == WINDOW_STEPS


def gated(spike_deviations: float | None, *, allows_overflow: bool = False) -> tuple[UpdateGate, Any, torch.Tensor]:
    """A gate in front of an optimizer, a function that makes a step with a loss and a norm, and the weight."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    mark_parameter(weight, is_counted=True)
    gate = UpdateGate(ParallelMesh.single(), spike_deviations=spike_deviations, allows_overflow=allows_overflow)
    mesh = ParallelMesh.single()
    clipping = Clipping(0.0, mesh.model, mesh.device)
    DirectView(stand_in_engine(optimizer), mesh, clipping, Buckets(1), [weight]).guard(gate)

    def step(loss: float, norm: float = 1.0, tokens: float = 4.0) -> UpdateDecision | None:
        weight.grad = torch.full((1,), -1.0)
        verdict = gate.begin(lambda: step_figures(loss, norm, tokens))
        optimizer.step()
        return verdict.decision

    return gate, step, weight


def test_spikes_are_dropped_and_forgotten() -> None:
    gate, step, weight = gated(3.0)
    for number in range(LEAST_STEPS):
        assert step(2.0 + 0.1 * (number % 2)) is UpdateDecision.APPLIED
    known = gate.to_json()
    assert step(9.0) is step(9.0) is UpdateDecision.SPIKE
    assert step(math.nan) is UpdateDecision.NOT_FINITE
    assert gate.verdict.consecutive_bad == 3
    assert gate.to_json() == {**known, "bad_in_a_row": [3.0]}
    assert step(2.05) is UpdateDecision.APPLIED
    assert gate.verdict.consecutive_bad == 0 and float(weight.detach()) == LEAST_STEPS + 1


def test_a_gate_continues_from_what_it_stored() -> None:
    gate, step, _ = gated(3.0)
    for number in range(LEAST_STEPS):
        step(2.0 + 0.1 * (number % 2))
    step(math.inf)
    resumed, step_resumed, _ = gated(3.0)
    resumed.restore(gate.to_json())
    assert resumed.to_json() == gate.to_json()
    assert step_resumed(9.0) is step(9.0) is UpdateDecision.SPIKE
    assert resumed.verdict.consecutive_bad == gate.verdict.consecutive_bad == 2


def test_without_a_limit_nothing_is_stored_and_no_spike_dropped() -> None:
    gate, step, _ = gated(None)
    for _ in range(LEAST_STEPS):
        step(2.0)
    assert step(1e9) is UpdateDecision.APPLIED
    assert gate.to_json() == {}


@pytest.mark.parametrize("allows_overflow", [False, True])
def test_a_step_without_a_counted_token_is_dropped_and_says_nothing_of_the_others(allows_overflow: bool) -> None:
    gate, step, weight = gated(3.0, allows_overflow=allows_overflow)
    for number in range(LEAST_STEPS):
        step(2.0 + 0.1 * (number % 2))
    known = gate.to_json()
    assert step(0.0, 0.0, 0.0) is UpdateDecision.EMPTY
    assert (gate.verdict.is_skipped, gate.verdict.is_bad, gate.to_json()) == (True, False, known)
    step(9.0)
    step(0.0, 5.0, 0.0)  # routers have losses of their own
    assert (gate.verdict.consecutive_bad, gate.in_bad_streak, float(weight.detach())) == (0, True, LEAST_STEPS)
    assert step(2.05) is UpdateDecision.APPLIED and not gate.in_bad_streak


def test_an_overflow_after_a_spike_is_no_bad_step_and_does_not_end_the_row() -> None:
    gate, step, _ = gated(3.0, allows_overflow=True)
    for number in range(LEAST_STEPS):
        step(2.0 + 0.1 * (number % 2))
    seen = []
    for loss in (9.0, math.inf, 9.0, 2.05, math.inf):
        step(loss)
        seen.append(gate.verdict.consecutive_bad)
    assert seen == [1, 0, 2, 0, 0]
