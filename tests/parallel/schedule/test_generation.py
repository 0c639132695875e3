"""The two ways to order computations: a fixed rule, and whatever is most urgent."""

from __future__ import annotations

from megatron.parallel.schedule.actions import Placement
from megatron.parallel.schedule.generation import GreedySchedule, fixed_orders
from megatron.parallel.schedule.simulation import Computation, shown


def text(order: list[Computation]) -> str:
    return " ".join(map(shown, order))


def test_one_forward_one_backward() -> None:
    first, second = fixed_orders(2, 1, 3)
    assert text(first) == "0F0 0F1 0B0 0F2 0B1 0B2"
    assert text(second) == "1F0 1B0 1F1 1B1 1F2 1B2"


def test_interleaving_takes_groups_through_a_chunk_after_the_other() -> None:
    first, second = fixed_orders(2, 2, 4)
    assert text(first) == "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3"
    assert text(second) == "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"


def test_a_group_that_is_not_full_leaves_the_rest_as_it_is() -> None:
    full, cut = fixed_orders(3, 2, 6), fixed_orders(3, 2, 5)
    assert cut == [[computation for computation in order if computation[2] < 5] for order in full]


def test_the_greedy_order_of_a_plain_pipeline_is_one_forward_one_backward() -> None:
    greedy = GreedySchedule(Placement.loop(4, 1), 8, [4, 3, 2, 1], splits=False)
    assert greedy.orders() == fixed_orders(4, 1, 8)
    assert greedy.end == 3 * (8 + 3)


def test_weights_fill_the_gaps() -> None:
    first, second = GreedySchedule(Placement.loop(2, 1), 3, [2, 2], splits=True).orders()
    assert text(first) == "0F0 0F1 0I0 0W0 0I1 0F2 0W1 0I2 0W2"
    assert text(second) == "1F0 1I0 1F1 1I1 1W0 1W1 1F2 1I2 1W2"
