"""Compiled blocks train as eager ones do: in every layout that allows them, and in every form of a block."""

from __future__ import annotations

import dataclasses
import gc

import pytest
import torch

from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_name, train_layouts
from tests.parity.reference import Recipe
from tests.parity.switches import SWITCHES

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), steps=2, global_batch_size=8, learning_rate=2.0e-3, num_layers=2)
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
# The graphs that inductor would get, run operation by operation, so that the layouts take seconds.
COMPILED = ["--compile", "--compile-backend", "aot_eager"]
LARGEST_RATIO = 1.0e-6
TRACED = [name for name in SWITCHES if "expert" not in name]

Curves = dict[int, list[tuple[float, float]]]


def train_both(
    rank: int, layout: tuple[int, int, int], stages: list[int], extras: list[list[str]]
) -> list[tuple[Curves, Curves]]:
    """The curves of eager and of compiled blocks for each set of flags, with an evaluation before the second step."""
    # As in a run. Before Python 3.12, an import fails if the collector interrupts it with a finalizer that imports
    # something (python/cpython#91351), and the compiler imports a lot at its first use.
    gc.disable()
    both = []
    for extra in extras:
        eager = train_layouts(rank, RECIPE, layout, stages, extra)
        both.append((eager, train_layouts(rank, RECIPE, layout, stages, [*extra, *COMPILED], evaluate_at=1)))
        torch.compiler.reset()
    return both


def check(both: list[tuple[Curves, Curves]]) -> None:
    """Losses and gradient norms are equal to rounding."""
    for eager, traced in both:
        assert eager.keys() == traced.keys()
        for stage, curve in traced.items():
            for one, other in zip(eager[stage], curve, strict=True):
                assert other == pytest.approx(one, rel=LARGEST_RATIO)


@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("layout", "stages", "extra"),
    [
        ((1, 1, 2), [0, 1, 2], DROPOUT),
        ((2, 1, 1), [1], [*DROPOUT, "--checkpoint-activations", "--distribute-saved-activations"]),
        ((1, 2, 1), [0, 1], [*DROPOUT, "--checkpoint-activations"]),
        ((2, 2, 1), [1], ["--recompute-activations"]),
    ],
    ids=lambda value: layout_name(value) if isinstance(value, tuple) else None,
)
def test_layouts(layout: tuple[int, int, int], stages: list[int], extra: list[str]) -> None:
    tp, pp, dp = layout
    for both in run_ranks(train_both, tp * pp * dp, layout, stages, [extra]):
        check(both)


@pytest.mark.full
@pytest.mark.parametrize("name", mark_campaign(TRACED, ["neox", "gemma2"]))
def test_forms_of_blocks(name: str) -> None:
    has_sinks = "--softmax-type" in SWITCHES[name]  # whose attention has no dropout
    dropout = [*DROPOUT, "--attention-dropout", "0"] if has_sinks else DROPOUT
    check(run_ranks(train_both, 1, (1, 1, 1), [1], [[*SWITCHES[name], *dropout, "--bf16"]])[0])
