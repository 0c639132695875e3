"""Checks the closed form on numbers worked out by hand; that DeepSpeed holds as much is checked with `held.py`."""

from __future__ import annotations

import pytest

from megatron.engine.memory.closed_form import Amounts, Partitioning, predicted_bytes

# 100 elements in two groups; on 4 ranks a rank updates 20 + 5 of them
GROUPS = [[30, 30, 20], [12, 8]]


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        (Partitioning(0, 4), Amounts(400, 400, 800, 1600)),
        (Partitioning(1, 4), Amounts(400, 400, 200, 1000)),
        (Partitioning(2, 4), Amounts(400, 100, 200, 700)),
        (Partitioning(3, 4), Amounts(100, 100, 300, 500)),
        (Partitioning(2, 4, offloads_optimizer=True), Amounts(400, 100, 300, 400)),
        (Partitioning(3, 4, offloads_optimizer=True), Amounts(100, 200, 300, 100)),
        (Partitioning(3, 4, offloads_optimizer=True, offloads_parameters=True), Amounts(100, 200, 300, 0)),
        (Partitioning(1, 4, offloads_optimizer=True), Amounts(400, 500, 300, 800)),
        (Partitioning(1, 4, weight_bytes=2), Amounts(200, 400, 300, 900)),
        (Partitioning(2, 4, weight_bytes=2), Amounts(200, 100, 300, 600)),
        (Partitioning(3, 4, weight_bytes=2), Amounts(50, 100, 300, 450)),
        (Partitioning(2, 4, offloads_optimizer=True, weight_bytes=2), Amounts(200, 100, 300, 200)),
    ],
    ids=str,
)
def test_the_closed_form_gives_these_bytes(how: Partitioning, expected: Amounts) -> None:
    assert predicted_bytes(GROUPS, how) == expected


def test_groups_may_be_kept_differently() -> None:
    assert predicted_bytes(GROUPS, Partitioning(1, 4), states=[4, 8]) == Amounts(400, 400, 4 * 20 + 8 * 5, 920)
    assert predicted_bytes(GROUPS, Partitioning(0, 4), states=[4, 0]).optimizer == 320
