"""Figures of the routing from what the routers recorded, and the warning when one collapses."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint.record import Progress
from megatron.model.blocks.router import BALANCE_LOSS, ENTROPY, PASSES, Z_LOSS, dropped_tokens, expert_tokens
from megatron.objective.metric import StepMetrics
from megatron.observe.metrics import mean_of, measure
from megatron.observe.metrics_file import MetricsFile
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


def layers(recorded: dict[str, Any] = RECORDED) -> dict[int, LayerRouting]:
    return layers_of_step({"source_losses": (1.0, 2.0), **recorded})


def step(recorded: dict[str, Any], *, skipped: bool = False) -> StepMetrics:
    outcome: Any = Outcome(skipped=skipped)
    others = routing_metrics(recorded, layers(recorded))
    return measure(Progress(1, 8, 128), outcome, WORKLOAD, others, train_iterations=9, learning_rate=0.1, seconds=1.0)


def figures(metrics: StepMetrics) -> list[float | None]:
    """The figures of all layers."""
    names = [name for name in metrics if name.startswith("routing/") and not name.endswith("layers")]
    assert len(names) == 7
    return [metrics.value(name) for name in names]


def test_losses_are_means_over_passes_and_loads_are_relative_to_an_even_one() -> None:
    assert figures(step(RECORDED)) == [1.25, 2.5, 0.75, 3.0, 2.25, 2, None]


def test_every_layer_has_the_shares_of_its_experts() -> None:
    first, second = layers()[0], layers()[2]
    assert (first.largest_load, second.largest_load) == (3.0, 1.5)
    assert first.shares == (0.75, 0.25, 0.0, 0.0) and first.dropped_ratios == ()
    assert first.effective_experts == pytest.approx(math.exp(0.75 * math.log(4 / 3) + 0.25 * math.log(4)))
    assert layers(EVEN)[0].effective_experts == pytest.approx(4.0)


def test_dropped_tokens_are_a_share_of_the_choices() -> None:
    dropping = layers(DROPS)
    assert step(DROPS).value("routing/dropped_ratio") == 0.25
    assert dropping[0].dropped_ratio == 0.375 and dropping[0].dropped_ratios == (0.5, 0.0, 0.0, 0.0)
    assert dropping[2].dropped_ratios == (0.0, 0.0, 0.33333, 0.0)


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


def test_an_interval_has_the_mean_of_the_steps_that_were_not_skipped() -> None:
    other = {**DROPS, BALANCE_LOSS: (9.0,), expert_tokens(0): (2.0, 2.0, 2.0, 2.0)}
    mean = mean_of([step(DROPS), step(other), step(DROPS, skipped=True)])
    assert figures(mean) == [1.75, 2.5, 0.75, 2.25, 1.75, 1.0, 0.25]


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
