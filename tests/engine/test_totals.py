"""Sums over micro-batches, and the result of a step."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron.engine.totals import StepResult, StepTotals
from megatron.objective.base import ObjectiveResult, sum_sizes
from megatron.objective.metric import MetricSpec, Reduction
from megatron.parallel.mesh import ParallelMesh

SPECS = {"accuracy": MetricSpec(), "per_source": MetricSpec(("a", "b"), Reduction.WEIGHTED_MEAN)}
OBJECTIVE: Any = SimpleNamespace(metrics=SPECS, statistics={"balance": 1})
SIZES = sum_sizes(OBJECTIVE)
NOTHING: Any = SimpleNamespace(metrics={}, statistics={})


def result(loss: float, tokens: float, **metrics: list[Any]) -> ObjectiveResult:
    return ObjectiveResult(
        torch.tensor(loss, requires_grad=True),
        torch.tensor(tokens),
        {name: torch.tensor(values) for name, values in metrics.items()},
    )


def step(totals: StepTotals, norm: torch.Tensor | float = 0.5) -> StepResult:
    sums = totals.over_ranks(ParallelMesh.single())
    figures = torch.cat([torch.as_tensor(norm, dtype=torch.float64).reshape(1), sums])
    return StepResult(figures, OBJECTIVE if len(sums) > 2 else NOTHING, sample_count=8, loss_scale=torch.tensor(2.0))


def test_micro_batches_add_up() -> None:
    totals = StepTotals(SIZES, torch.device("cpu"))
    totals.add(
        result(6.0, 2.0, accuracy=[1.0, 3.0], per_source=[[1.0, 2.0], [3.0, 0.0]]), {"balance": torch.tensor(0.25)}
    )
    totals.add(
        result(4.0, 3.0, accuracy=[2.0, 1.0], per_source=[[4.0, 0.0], [1.0, 0.0]]), {"unknown": torch.tensor(9.0)}
    )
    totals.add_auxiliary({"balance": torch.tensor(0.5), "unknown": torch.tensor(9.0)})
    outcome = step(totals, torch.tensor(0.125))
    assert (outcome.loss, outcome.token_count, outcome.gradient_norm) == (2.0, 5, 0.125)
    assert outcome.sums == {"accuracy": [3.0, 4.0], "per_source": [5.0, 2.0, 4.0, 0.0], "balance": [0.75]}
    assert {name: metric.value for name, metric in outcome.metrics.items()} == {
        **{"accuracy": 0.75, "per_source/a": 1.25, "per_source/b": None}
    }
    assert (outcome.sample_count, outcome.skipped, outcome.loss_scale) == (8, False, 2.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_nan_loss_stays_nan(value: float) -> None:
    totals = StepTotals({}, torch.device("cpu"))
    totals.add(result(value, 4.0), {})
    sums = totals.over_ranks(ParallelMesh.single())
    outcome = StepResult(torch.cat([torch.tensor([value], dtype=torch.float64), sums]), NOTHING, sample_count=1)
    assert not math.isfinite(outcome.loss)
    assert not math.isfinite(outcome.gradient_norm)
    assert (outcome.token_count, outcome.metrics) == (4, {})


def test_small_losses_are_not_lost_among_many_micro_batches() -> None:
    totals = StepTotals({}, torch.device("cpu"))
    for _ in range(3):
        totals.add(result(2.0**24, 1.0), {})
        totals.add(result(1.0, 1.0), {})
    assert totals.over_ranks(ParallelMesh.single())[0] == 3 * 2.0**24 + 3
