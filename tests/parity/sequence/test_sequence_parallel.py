"""With the tokens of a sample split over the tensor-parallel ranks, every layout trains like one process."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_name, train_layouts
from tests.parity.reference import Recipe

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), steps=5, learning_rate=2.0e-3)
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
SPLIT = [*DROPOUT, "--sequence-parallel"]

Curve = list[tuple[float, float]]


@pytest.fixture(scope="module")
def expected() -> Curve:
    return run_ranks(train_layouts, 1, RECIPE, (1, 1, 1), [0], DROPOUT)[0][0]


@pytest.mark.parametrize(
    ("layout", "zero_stages"), [((2, 1, 1), [0, 1, 2, 3]), ((2, 2, 1), [0, 1])], ids=[layout_name((2, 1, 1)), "tp2-pp2"]
)
def test_layout_equals_one_process(layout, zero_stages, expected):
    tp, pp, dp = layout
    assert min(norm for _, norm in expected) > RECIPE.clip
    for curves in run_ranks(train_layouts, tp * pp * dp, RECIPE, layout, zero_stages, SPLIT):
        for stage, curve in curves.items():
            for step, (found, one) in enumerate(zip(curve, expected, strict=True)):
                assert found[0] == pytest.approx(one[0], rel=4.0e-7), f"ZeRO {stage}: loss of step {step}"
                assert found[1] == pytest.approx(one[1], rel=1.0e-6), f"ZeRO {stage}: gradient norm of step {step}"
