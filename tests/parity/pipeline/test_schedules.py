"""Every pipeline schedule trains like one process, with ZeRO, tensor and data parallelism and recomputation."""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import pytest

from megatron.config.sections.pipelines import SCHEDULE_CHUNKS
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import sampled
from tests.parity.layouts import layout_config, layout_name, local_batches
from tests.parity.reference import Recipe

pytestmark = pytest.mark.slow
# Samples of each step: one to six micro-batches.
BATCH_SIZES = (8, 4, 12, 4, 8)
# Dropout, a tied head, clipping, two groups with different weight decay, and masks that differ from sample to sample.
RECIPE = dataclasses.replace(
    Recipe(), num_layers=5, hidden_size=16, steps=len(BATCH_SIZES), learning_rate=2.0e-3, clip=0.2
)
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
LOSS_RATIO, NORM_RATIO = 4.0e-7, 1.0e-6
EVALUATED = 2  # before this step, a single micro-batch
RECOMPUTED = {"none": [], "attention": ["--recompute-activations"], "blocks": ["--checkpoint-activations"]}

Curve = list[tuple[float, float]]


class Case(NamedTuple):
    """A pipeline of two ranks, in a layout."""

    schedule: str
    zero_stage: int
    recomputed: str

    @property
    def flags(self) -> list[str]:
        return ["--pipeline-schedule", self.schedule, *RECOMPUTED[self.recomputed]]


# Every pair of values of two columns is in one of the layouts.
KEPT = {
    (1, 2, 1): [Case("1f1b", 2, "blocks"), Case("zbv", 0, "attention"), Case("interleaved-zb", 1, "blocks")],
    (1, 2, 2): [Case("interleaved", 2, "none"), Case("zbv", 2, "blocks"), Case("v-1f1b", 1, "attention")],
    (2, 2, 1): [Case("zb-h1", 2, "attention"), Case("interleaved-zb", 0, "none"), Case("v-half", 1, "blocks")],
}


def train_cases(rank: int, layout: tuple[int, int, int], cases: list[tuple[int, list[str]]]) -> list[Curve]:
    """The curves of loss and gradient norm of ZeRO stages and flags; last the loss of an evaluation."""
    curves, mesh = [], None
    for zero_stage, flags in cases:
        config = layout_config(RECIPE, layout, zero_stage, [*DROPOUT, *flags])
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        curve = []
        for step, size in enumerate(BATCH_SIZES):
            batches = local_batches(dataclasses.replace(RECIPE, global_batch_size=size), config, mesh, step, True)
            if step == EVALUATED:
                engine.evaluate(batches[:1])
            result = engine.train_batch(batches, RECIPE.learning_rate)
            curve.append((result.loss, result.gradient_norm))
        loss_sum, tokens = engine.evaluate(batches)
        curves.append([*curve, (loss_sum / tokens, 1.0)])
    return curves


@pytest.fixture(scope="module")
def expected() -> Curve:
    return run_ranks(train_cases, 1, (1, 1, 1), [(0, [])])[0][0]


def check(layout: tuple[int, int, int], cases: list[Case], expected: Curve) -> None:
    assert min(norm for _, norm in expected) > RECIPE.clip, "clipping must be active"
    tp, pp, dp = layout
    asked = [(case.zero_stage, case.flags) for case in cases]
    for curves in run_ranks(train_cases, tp * pp * dp, layout, asked, timeout_seconds=60 + 20 * len(cases)):
        for case, curve in zip(cases, curves, strict=True):
            for step, (found, one) in enumerate(zip(curve, expected, strict=True)):
                assert found[0] == pytest.approx(one[0], rel=LOSS_RATIO), f"{case}: loss of step {step}"
                assert found[1] == pytest.approx(one[1], rel=NORM_RATIO), f"{case}: gradient norm of step {step}"


@pytest.mark.parametrize("layout", KEPT, ids=layout_name)
def test_a_schedule_equals_one_process(layout: tuple[int, int, int], expected: Curve) -> None:
    check(layout, KEPT[layout], expected)


@pytest.mark.parametrize("layout", sampled([*KEPT, (2, 2, 2)], []), ids=layout_name)
def test_all_combinations_equal_one_process(layout: tuple[int, int, int], expected: Curve) -> None:
    check(layout, [Case(*case) for case in itertools.product(SCHEDULE_CHUNKS, (0, 1, 2), RECOMPUTED)], expected)
