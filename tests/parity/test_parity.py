"""The proof: every legal layout trains like one process of plain PyTorch."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import LAYOUTS, initial_weights, layout_name, legal_zero_stages, train_layouts
from tests.parity.reference import Recipe, train_reference

pytestmark = pytest.mark.slow
RECIPE = Recipe()
KEPT = [(1, 1, 1), (1, 1, 2), (2, 2, 1), (2, 1, 2)]
LOSS_RATIO = 1.0e-5
NORM_RATIO = 1.0e-4
# bf16 keeps 8 bits: one rounding is 4e-3; the losses of 20 steps stay within a few of them.
BF16_LOSS_RATIO = 3.0e-2


@pytest.fixture(scope="module")
def reference():
    return train_reference(initial_weights(RECIPE), RECIPE)


def check_curve(curve, expected, label):
    assert len(curve) == len(expected)
    for step, ((loss, norm), (true_loss, true_norm)) in enumerate(zip(curve, expected, strict=True)):
        assert loss == pytest.approx(true_loss, rel=LOSS_RATIO), f"{label}: loss of step {step}"
        assert norm == pytest.approx(true_norm, rel=NORM_RATIO), f"{label}: gradient norm of step {step}"


def test_the_parity_recipe_exercises_all_features(reference):
    losses, norms = zip(*reference, strict=True)
    assert losses[-1] < losses[0] - 0.15, "the recipe must learn something"
    assert max(norms) > RECIPE.clip, "clipping must be active"


@pytest.mark.sampled(2)
@pytest.mark.parametrize("layout", mark_campaign(LAYOUTS, KEPT), ids=layout_name)
def test_fp32_layout_equals_reference(layout, reference):
    tp, pp, dp = layout
    curves = run_ranks(train_layouts, tp * pp * dp, RECIPE, layout, legal_zero_stages(pp), [], False, 4)
    for rank, per_stage in enumerate(curves):
        for stage, curve in per_stage.items():
            check_curve(curve, reference, f"rank {rank}, ZeRO-{stage}")


@pytest.mark.parametrize(
    "layout", mark_campaign([(1, 1, 1), (1, 1, 2), (2, 2, 1), (1, 2, 2)], [(1, 2, 2)]), ids=layout_name
)
def test_uneven_masks_weight_tokens_not_micro_batches(layout):
    # Uneven masks make single steps noisier; a calmer rate keeps rounding differences from growing through Adam.
    recipe = dataclasses.replace(RECIPE, learning_rate=2.0e-3)
    expected = train_reference(initial_weights(recipe), recipe, uneven=True)
    curves = run_ranks(train_layouts, layout[0] * layout[1] * layout[2], recipe, layout, [1], [], True)
    check_curve(curves[0][1], expected, "uneven masks")


LOSSES = ["--label-smoothing", "0.1", "--z-loss-coeff", "0.01"]
MUP = ["--use-mup", "--mup-base-hidden-size", "8", "--mup-base-head-dim", "4"]
RECIPES = {
    "smoothed labels and z-loss": (dataclasses.replace(RECIPE, label_smoothing=0.1, z_loss_coeff=0.01), LOSSES),
    "mup": (dataclasses.replace(RECIPE, width_ratio=4.0), MUP),
}


def train_recipes(rank, layout, extra):
    return {
        name: train_layouts(rank, dataclasses.replace(recipe, steps=4), layout, [0, 3], [*flags, *extra], True, 2)
        for name, (recipe, flags) in RECIPES.items()
    }


@pytest.mark.full
def test_other_losses_and_learning_rates_equal_reference():
    fp32, bf16 = (run_ranks(train_recipes, 2, (2, 1, 1), extra)[0] for extra in ([], ["--bf16"]))
    for name, (recipe, flags) in RECIPES.items():
        recipe = dataclasses.replace(recipe, steps=4)
        expected = train_reference(initial_weights(recipe, flags), recipe, uneven=True)
        plain = train_reference(initial_weights(recipe, flags), dataclasses.replace(RECIPE, steps=4), uneven=True)
        assert abs(plain[-1][0] - expected[-1][0]) > 10 * LOSS_RATIO * expected[-1][0], f"{name} changes nothing"
        for stage, curve in fp32[name].items():
            check_curve(curve, expected, f"{name}, ZeRO-{stage}")
        for stage, curve in bf16[name].items():
            found, true = ([loss for loss, _ in losses] for losses in (curve, expected))
            assert found == pytest.approx(true, rel=BF16_LOSS_RATIO), f"{name}, bf16, ZeRO-{stage}"


# The golden curves compare the other layouts in bf16 with one process.
@pytest.mark.parametrize("layout", mark_campaign([(1, 1, 1), (1, 1, 2), (2, 2, 1)], [(1, 1, 1)]), ids=layout_name)
def test_bf16_layout_stays_near_reference(layout, reference):
    tp, pp, dp = layout
    curves = run_ranks(train_layouts, tp * pp * dp, RECIPE, layout, legal_zero_stages(pp)[1:], ["--bf16"])
    for stage, curve in curves[0].items():
        for step, ((loss, _), (true_loss, _)) in enumerate(zip(curve, reference, strict=True)):
            assert loss == pytest.approx(true_loss, rel=BF16_LOSS_RATIO), f"ZeRO-{stage}: loss of step {step}"
        assert curve[0][1] == pytest.approx(reference[0][1], rel=1.0e-2), f"ZeRO-{stage}: first gradient norm"
