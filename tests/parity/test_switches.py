"""Every switch of the network trains alike on one process, split over tensor ranks, over stages, and under ZeRO-3."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from megatron.config import ModelConfig
from megatron.config.flags.fields import flags_of
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, train_layouts
from tests.parity.reference import Recipe
from tests.parity.switches import ELSEWHERE, SWITCHES

pytestmark = pytest.mark.slow
# Two micro-batches a step, or one on each of two replicas; the second step shows the update of the first.
RECIPE = dataclasses.replace(Recipe(), steps=2, global_batch_size=4, learning_rate=2.0e-3)

Curve = list[tuple[float, float]]


def train_switches(rank: int, layout: tuple[int, int, int], zero_stage: int, extra: list[str]) -> dict[str, Curve]:
    """The curves of the architectures, trained one after another in the same processes: with ZeRO-3, every other."""
    return {
        name: train_layouts(rank, RECIPE, layout, [zero_stage], [*SWITCHES[name], *extra])[zero_stage]
        for name in trained(zero_stage)
    }


def trained(zero_stage: int) -> list[str]:
    """The architectures that are trained with a stage: what ZeRO-3 gathers is not the switches' concern."""
    return list(SWITCHES)[:: 2 if zero_stage == 3 else 1]


@pytest.fixture(scope="module")
def expected() -> dict[str, Curve]:
    return run_ranks(train_switches, 1, (1, 1, 1), 1, [])[0]


def test_every_switch_is_turned() -> None:
    models = [layout_config(RECIPE, (1, 1, 1), 0, flags).model for flags in SWITCHES.values()]
    for flag in flags_of(ModelConfig):
        choices = (False, True) if flag.element is bool else () if flag.is_tuple else flag.facts.choices
        turned = {getattr(model, flag.field) for model in models}
        assert turned >= set(choices) or flag.field in ELSEWHERE, (flag.name, set(choices) - turned)


def test_every_architecture_is_another_network(expected):
    for one, other in itertools.combinations(expected.values(), 2):
        apart = np.abs(np.subtract(one, other)).max(axis=0)  # of the losses, and of the gradient norms
        assert apart[0] > 1.0e-4 or apart[1] > 1.0e-3


@pytest.mark.full
@pytest.mark.parametrize(
    ("layout", "zero_stage", "extra"),
    [
        ((2, 1, 1), 1, ["--checkpoint-activations"]),
        ((1, 2, 1), 0, []),
        ((1, 1, 2), 3, ["--recompute-activations"]),
    ],
    ids=["tp2-recompute", "pp2", "dp2-zero3-selective"],
)
def test_layout_equals_one_process(layout, zero_stage, extra, expected):
    tp, pp, dp = layout
    found = run_ranks(train_switches, tp * pp * dp, layout, zero_stage, extra)[0]
    assert list(found) == trained(zero_stage)
    for name, curve in found.items():
        for step, (other, one) in enumerate(zip(curve, expected[name], strict=True)):
            assert other[0] == pytest.approx(one[0], rel=1.0e-5), f"{name}: loss of step {step}"
            assert other[1] == pytest.approx(one[1], rel=1.0e-4), f"{name}: gradient norm of step {step}"
