"""Figures of the routing from what the routers recorded, and the warning when one collapses."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.model.blocks.router import BALANCE_LOSS, ENTROPY, PASSES, Z_LOSS, expert_tokens
from megatron.objective.metric import StepMetrics
from megatron.observe.metrics import measure
from megatron.observe.report import Report, ReportOutputs
from megatron.observe.routing import (
    COLLAPSE_STEPS,
    EXTREMES,
    CollapseWatch,
    LayerRouting,
    layers_of_step,
    routing_metrics,
)
from megatron.observe.styles import megatron
from tests.train.samples import WORKLOAD, Outcome, optim_config, report_config

RECORDED = {
    BALANCE_LOSS: (5.0,),
    Z_LOSS: (10.0,),
    ENTROPY: (3.0,),
    PASSES: (4.0,),
    expert_tokens(0): (6.0, 2.0, 0.0, 0.0),
    expert_tokens(2): (2.0, 2.0, 3.0, 1.0),
}
EVEN = {**RECORDED, expert_tokens(0): (5.0,) * 4}


def layers(recorded: dict[str, Any] = RECORDED) -> dict[int, LayerRouting]:
    return layers_of_step({"source_losses": (1.0, 2.0), **recorded})


def step(recorded: dict[str, Any], *, skipped: bool = False) -> StepMetrics:
    outcome: Any = Outcome(skipped=skipped)
    others = routing_metrics(recorded, layers(recorded))
    return measure(Progress(1, 8, 128), outcome, WORKLOAD, others, train_iterations=9, learning_rate=0.1, seconds=1.0)


def test_every_layer_has_the_shares_of_its_experts() -> None:
    first, second = layers()[0], layers()[2]
    assert (first.largest_load, second.largest_load) == (3.0, 1.5)
    assert first.shares == (0.75, 0.25, 0.0, 0.0) and first.dropped_ratios == ()
    assert first.effective_experts == pytest.approx(math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4)))
    assert layers(EVEN)[0].effective_experts == pytest.approx(4.0)


def test_a_network_of_many_experts_lists_the_busiest_and_the_idlest() -> None:
    """48 layers of 128 experts, as in Qwen3-30B-A3B: a record a step that stays small."""
    counts = [2.0] * 128
    counts[7], counts[90], counts[3] = 40.0, 30.0, 0.0
    many = layers({**RECORDED, **{expert_tokens(layer): tuple(counts) for layer in range(48)}})
    layer = many[47]
    assert layer.shares == () and len(layer.busiest) == len(layer.idlest) == EXTREMES
    total = sum(counts)
    assert list(layer.busiest.items())[:2] == [(7, round(40 / total, 5)), (90, round(30 / total, 5))]
    assert next(iter(layer.idlest.items())) == (3, 0.0)
    assert len(json.dumps({index: vars(each) for index, each in many.items()})) < 20_000
    assert layers()[0].busiest == {}


def test_a_network_without_experts_has_no_figures() -> None:
    assert not [name for name in step({}) if name.startswith("routing")]


def collapsed(experts: int, top_k: int) -> dict[int, LayerRouting]:
    """Every token has chosen the same experts."""
    return layers({**RECORDED, expert_tokens(0): (100.0,) * top_k + (0.0,) * (experts - top_k)})


def test_a_router_that_collapses_is_reported_once() -> None:
    watch = CollapseWatch(2)
    told = [list(watch.sentences(collapsed(8, 2))) for _ in range(3 * COLLAPSE_STEPS)]
    (place,) = (number for number, sentences in enumerate(told, start=1) if sentences)
    assert place == COLLAPSE_STEPS
    (sentence,) = told[place - 1]
    assert "layer 0 has collapsed" in sentence and "only 2.0 of 8 experts" in sentence
    assert list(watch.sentences(layers(EVEN))) == []
    again = [list(watch.sentences(collapsed(8, 2))) for _ in range(COLLAPSE_STEPS)]
    assert again[-1] and not any(again[:-1])


def test_uneven_routers_and_those_without_a_choice_have_not_collapsed() -> None:
    watch = CollapseWatch(2)
    for _ in range(2 * COLLAPSE_STEPS):
        assert list(watch.sentences(layers({**RECORDED, expert_tokens(0): (60.0, 20.0, 10.0, 10.0)}))) == []
        assert list(watch.sentences(collapsed(2, 2))) == []


def test_the_report_warns(capfd: pytest.CaptureFixture[str]) -> None:
    report = Report(
        report_config(), optim_config(train_samples=80), WORKLOAD, ReportOutputs(megatron), experts_per_token=2
    )
    planted = {**EVEN, expert_tokens(2): (50.0, 50.0, 0.0, 0.0)}
    for number in range(1, COLLAPSE_STEPS + 2):
        report.step(Progress(number, 8 * number, 128 * number), Outcome(sums=planted), 0.1, 1.0)
    text = capfd.readouterr().err
    assert text.count("has collapsed") == 1
    assert f"iteration {COLLAPSE_STEPS}: the router of layer 2 has collapsed" in text
