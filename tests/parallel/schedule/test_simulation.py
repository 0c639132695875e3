"""The clock of schedules: times, messages and memory of small cases by hand, and what a deadlock is called."""

from __future__ import annotations

import re

import pytest

from megatron.parallel.schedule.actions import Kind, Placement
from megatron.parallel.schedule.simulation import (
    Computation,
    alive_after_each,
    bubble_ratio,
    peak_alive,
    simulate,
)

TWO = Placement.loop(2, 1)


def order(text: str) -> list[Computation]:
    """Computations from `0F0 0B0`."""
    found = (re.fullmatch(r"(\d+)([FBIW])(\d+)", word) for word in text.split())
    return [(Kind(match[2]), int(match[1]), int(match[3])) for match in found if match]


def test_each_starts_when_its_rank_is_free_and_its_inputs_are_there() -> None:
    spans = simulate([order("0F0 0F1 0B0 0B1"), order("1F0 1B0 1F1 1B1")], TWO)
    times = {f"{span.chunk}{span.kind.value}{span.micro_batch}": (span.start, span.end) for span in spans}
    assert times == {
        **{"0F0": (0, 1), "0F1": (1, 2), "0B0": (4, 6), "0B1": (7, 9)},
        **{"1F0": (1, 2), "1B0": (2, 4), "1F1": (4, 5), "1B1": (5, 7)},
    }
    assert bubble_ratio(spans, 2) == pytest.approx(1 - 12 / 18)


def test_a_chunk_that_costs_more_takes_longer() -> None:
    spans = simulate([order("0F0 0F1 0B0 0B1"), order("1F0 1B0 1F1 1B1")], TWO, chunk_costs=(1, 3))
    assert [(span.start, span.end) for span in spans if span.chunk == 1] == [(1, 4), (4, 10), (10, 13), (13, 19)]
    assert max(span.end for span in spans) == 21


def test_weights_wait_for_the_gradient_of_the_input_only() -> None:
    spans = simulate([order("0F0 0I0 0W0"), order("1F0 1I0 1W0")], TWO)
    starts = {(span.rank, span.kind): span.start for span in spans}
    assert (starts[1, Kind.INPUT_BACKWARD], starts[1, Kind.WEIGHT_BACKWARD]) == (2, 3)
    assert (starts[0, Kind.INPUT_BACKWARD], starts[0, Kind.WEIGHT_BACKWARD]) == (3, 4)


def test_activations_live_until_the_gradients_of_weights() -> None:
    assert alive_after_each(order("0F0 0F1 0I0 0W0 0I1 0W1")) == [1, 2, 2, 1, 1, 0]
    assert peak_alive([order("0F0 0B0"), order("0F0 0F1 0B0 0B1")]) == (1, 2)
