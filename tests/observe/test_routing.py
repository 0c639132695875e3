"""Figures of the routing from what the routers recorded, and the warning when one collapses."""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.model.blocks.router import BALANCE_LOSS, ENTROPY, PASSES, Z_LOSS, dropped_tokens, expert_tokens
from megatron.observe.metrics import StepMetrics, mean_of, measure
from megatron.observe.metrics_file import MetricsFile
from megatron.observe.report import Report, ReportOutputs
from megatron.observe.routing import (
    COLLAPSE_STEPS,
    EXTREMES,
    CollapseWatch,
    RoutingFigures,
    mean_routing,
    routing_figures,
)
from megatron.observe.styles import megatron
from tests.train.samples import WORKLOAD, Outcome, metrics, optim_config, report_config
from trident.dashboard.table import MetricsTable

RECORDED = {
    BALANCE_LOSS: (5.0,),
    Z_LOSS: (10.0,),
    ENTROPY: (3.0,),
    PASSES: (4.0,),
    expert_tokens(0): (6.0, 2.0, 0.0, 0.0),
    expert_tokens(2): (2.0, 2.0, 3.0, 1.0),
}
EVEN = {**RECORDED, expert_tokens(0): (5.0,) * 4}
DROPS = {**RECORDED, dropped_tokens(0): (3.0, 0.0, 0.0, 0.0), dropped_tokens(2): (0.0, 0.0, 1.0, 0.0)}


def figures(recorded: dict[str, Any] = RECORDED) -> RoutingFigures:
    found = routing_figures({"source_loss": (1.0, 2.0), **recorded})
    assert found is not None
    return found


def step(recorded: dict[str, Any], *, skipped: bool = False) -> StepMetrics:
    outcome = Outcome(metrics=recorded, skipped=skipped)
    return measure(Progress(1, 8, 128), outcome, WORKLOAD, train_iterations=9, learning_rate=0.1, seconds=1.0)


def test_losses_are_means_over_passes_and_loads_are_relative_to_an_even_one() -> None:
    expected = RoutingFigures(1.25, 2.5, 0.75, largest_load=3.0, mean_largest_load=2.25, idle_experts=2)
    assert dataclasses.replace(figures(), layers={}) == expected


def test_every_layer_has_the_shares_of_its_experts() -> None:
    first, second = figures().layers[0], figures().layers[2]
    assert (first.largest_load, second.largest_load) == (3.0, 1.5)
    assert first.shares == (0.75, 0.25, 0.0, 0.0) and first.dropped_ratios == ()
    assert first.effective_experts == pytest.approx(math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4)))
    assert figures(EVEN).layers[0].effective_experts == pytest.approx(4.0)


def test_dropped_tokens_are_a_share_of_the_choices() -> None:
    dropping = figures(DROPS)
    assert dropping.dropped_ratio == 0.25 and dropping.by_label["dropped tokens"] == 0.25
    assert dropping.layers[0].dropped_ratio == 0.375 and dropping.layers[0].dropped_ratios == (0.5, 0.0, 0.0, 0.0)
    assert dropping.layers[2].dropped_ratios == (0.0, 0.0, 0.33333, 0.0)
    assert figures().dropped_ratio is None and "dropped tokens" not in figures().by_label


def test_a_network_of_many_experts_lists_the_busiest_and_the_idlest() -> None:
    """48 layers of 128 experts, as in Qwen3-30B-A3B: a record a step that stays small."""
    counts = [2.0] * 128
    counts[7], counts[90], counts[3] = 40.0, 30.0, 0.0
    many = figures({**RECORDED, **{expert_tokens(layer): tuple(counts) for layer in range(48)}})
    layer = many.layers[47]
    assert layer.shares == () and len(layer.busiest) == len(layer.idlest) == EXTREMES
    total = sum(counts)
    assert list(layer.busiest.items())[:2] == [(7, round(40 / total, 5)), (90, round(30 / total, 5))]
    assert next(iter(layer.idlest.items())) == (3, 0.0)
    assert len(json.dumps(dataclasses.asdict(many))) < 20_000
    assert figures().layers[0].busiest == {}
    other = figures({**RECORDED, **{expert_tokens(layer): tuple(reversed(counts)) for layer in range(48)}})
    mean = mean_routing([many, other])
    assert mean is not None and mean.layers[47].busiest == other.layers[47].busiest
    assert mean.layers[47].largest_load == pytest.approx(layer.largest_load)


def test_a_network_without_experts_has_no_figures() -> None:
    assert routing_figures({"source_loss": (1.0, 2.0)}) is None


def test_an_interval_has_the_mean_of_the_steps_that_were_not_skipped() -> None:
    other = {**DROPS, BALANCE_LOSS: (9.0,), expert_tokens(0): (2.0, 2.0, 2.0, 2.0)}
    steps = [step(DROPS), step(other), step(DROPS, skipped=True)]
    assert steps[0].routing == figures(DROPS)
    mean = mean_of(steps).routing
    assert mean is not None
    assert dataclasses.replace(mean, layers={}) == RoutingFigures(1.75, 2.5, 0.75, 2.25, 1.75, 1.0, 0.25)
    assert mean.layers[0].shares == (0.5, 0.25, 0.125, 0.125) and mean.layers[0].experts == 4
    assert mean_of([metrics()]).routing is None


def test_the_files_and_the_dashboard_have_every_layer_and_expert(tmp_path: Path) -> None:
    file = MetricsFile(tmp_path / "metrics.jsonl")
    file.step(step(DROPS))
    file.close()
    record = json.loads((tmp_path / "metrics.jsonl").read_text(encoding="utf-8"))
    assert record["routing"]["layers"]["0"]["shares"] == [0.75, 0.25, 0.0, 0.0]
    table = MetricsTable()
    table.add([record])
    names = set(table.metrics())
    assert {"largest_load of layer 2", "shares of layer 0, expert 1", "dropped_ratios of layer 2, expert 2"} <= names


def collapsed(experts: int, top_k: int) -> RoutingFigures:
    """Every token has chosen the same experts."""
    return figures({**RECORDED, expert_tokens(0): (100.0,) * top_k + (0.0,) * (experts - top_k)})


def test_a_router_that_collapses_is_reported_once() -> None:
    watch = CollapseWatch(2)
    told = [list(watch.sentences(collapsed(8, 2))) for _ in range(3 * COLLAPSE_STEPS)]
    (place,) = (number for number, sentences in enumerate(told, start=1) if sentences)
    assert place == COLLAPSE_STEPS
    (sentence,) = told[place - 1]
    assert "layer 0 has collapsed" in sentence and "as few as 2.0 of 8 experts" in sentence
    assert list(watch.sentences(figures(EVEN))) == []
    again = [list(watch.sentences(collapsed(8, 2))) for _ in range(COLLAPSE_STEPS)]
    assert again[-1] and not any(again[:-1])


def test_uneven_routers_and_those_without_a_choice_have_not_collapsed() -> None:
    watch = CollapseWatch(2)
    for _ in range(2 * COLLAPSE_STEPS):
        assert list(watch.sentences(figures({**RECORDED, expert_tokens(0): (60.0, 20.0, 10.0, 10.0)}))) == []
        assert list(watch.sentences(collapsed(2, 2))) == []


def test_the_report_warns(capfd: pytest.CaptureFixture[str]) -> None:
    report = Report(
        report_config(), optim_config(train_samples=80), WORKLOAD, ReportOutputs(megatron), experts_per_token=2
    )
    planted = {**EVEN, expert_tokens(2): (50.0, 50.0, 0.0, 0.0)}
    for number in range(1, COLLAPSE_STEPS + 2):
        report.step(Progress(number, 8 * number, 128 * number), Outcome(metrics=planted), 0.1, 1.0)
    text = capfd.readouterr().err
    assert text.count("has collapsed") == 1
    assert f"iteration {COLLAPSE_STEPS}: the router of layer 2 has collapsed" in text
