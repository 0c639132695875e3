"""Figures of the routing from what the routers recorded."""

from __future__ import annotations

import dataclasses

from megatron.checkpoint.record import Progress
from megatron.model.blocks.router import BALANCE_LOSS, ENTROPY, PASSES, Z_LOSS, expert_tokens
from megatron.observe.metrics import RoutingFigures, mean_of, measure, routing_figures
from tests.train.samples import WORKLOAD, Outcome, metrics

RECORDED = {
    BALANCE_LOSS: (5.0,),
    Z_LOSS: (10.0,),
    ENTROPY: (3.0,),
    PASSES: (4.0,),
    expert_tokens(0): (6.0, 2.0, 0.0, 0.0),
    expert_tokens(2): (2.0, 2.0, 3.0, 1.0),
}
FIGURES = RoutingFigures(1.25, 2.5, 0.75, largest_load=3.0, mean_largest_load=2.25, idle_experts=2)


def test_losses_are_means_over_passes_and_loads_are_relative_to_an_even_one() -> None:
    assert routing_figures({"source_loss": (1.0, 2.0), **RECORDED}) == FIGURES


def test_a_network_without_experts_has_no_figures() -> None:
    assert routing_figures({"source_loss": (1.0, 2.0)}) is None


def test_every_figure_has_a_label() -> None:
    assert list(FIGURES.by_label.values()) == list(dataclasses.asdict(FIGURES).values())


def test_an_interval_has_the_mean_of_the_steps_that_were_not_skipped() -> None:
    other = {**RECORDED, BALANCE_LOSS: (9.0,), expert_tokens(0): (2.0, 2.0, 2.0, 2.0)}
    steps = [
        measure(Progress(1, 8, 128), Outcome(metrics=found, skipped=skipped), WORKLOAD, train_iterations=9,
                learning_rate=0.1, seconds=1.0)
        for found, skipped in ((RECORDED, False), (other, False), (RECORDED, True))
    ]  # fmt: skip
    assert steps[0].routing == FIGURES
    assert mean_of(steps).routing == RoutingFigures(1.75, 2.5, 0.75, 2.25, 1.75, 1.0)
    assert mean_of([metrics()]).routing is None
