"""Products in eight bits, emulated: near those in bfloat16, and alike in every layout."""

from __future__ import annotations

import dataclasses

import pytest

from tests.helpers.ranks import run_ranks
from tests.parity.layouts import train_layouts
from tests.parity.reference import Recipe

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), steps=3, hidden_size=64, global_batch_size=4, learning_rate=2.0e-3)
PLAIN = ["--bf16"]
EMULATED = [*PLAIN, "--fp8-format", "hybrid", "--fp8-emulation"]
ROWS = ["--fp8-recipe", "rowwise"]
MULTI_QUERY = ["--num-query-groups", "1"]
ENDS = ["--first-last-layers-bf16"]
ALONE = {
    "plain": PLAIN,
    "emulated": EMULATED,
    "rows": [*EMULATED, *ROWS],
    "e4m3": [*PLAIN, "--fp8-e4m3", "--fp8-emulation"],
    "no weight gradients": [*EMULATED, "--no-fp8-wgrad"],
    "ends": [*EMULATED, *ENDS],
    "multi-query": [*EMULATED, *MULTI_QUERY],
    "recomputed": [*EMULATED, "--checkpoint-activations"],
}
# Name of the run of one process, layout, ZeRO stage and flags.
SPLIT = [
    ("emulated", (2, 1, 1), 1, []),
    ("rows", (2, 1, 1), 1, [*ROWS, "--sequence-parallel"]),
    ("multi-query", (2, 1, 1), 1, MULTI_QUERY),
    ("ends", (1, 2, 1), 1, [*ENDS, "--pipeline-schedule", "zb-h1"]),
    ("emulated", (1, 1, 2), 3, []),
]

Curve = list[tuple[float, float]]


def train_alone(rank: int) -> dict[str, Curve]:
    return {name: train_layouts(rank, RECIPE, (1, 1, 1), [1], flags)[1] for name, flags in ALONE.items()}


def train_split(rank: int) -> list[Curve]:
    return [train_layouts(rank, RECIPE, layout, [zero], [*EMULATED, *extra])[zero] for _, layout, zero, extra in SPLIT]


@pytest.fixture(scope="module")
def alone() -> dict[str, Curve]:
    return run_ranks(train_alone, 1)[0]


def apart(one: Curve, other: Curve) -> tuple[float, float]:
    """The largest relative differences of losses and of gradient norms."""
    pairs = [zip(*step, strict=True) for step in zip(one, other, strict=True)]
    losses, norms = zip(*[[abs(a - b) / b for a, b in pair] for pair in pairs], strict=True)
    return max(losses), max(norms)


def test_eight_bits_stay_near_bfloat16(alone: dict[str, Curve]) -> None:
    for name in ("emulated", "rows", "e4m3", "no weight gradients", "ends"):
        losses, norms = apart(alone[name], alone["plain"])
        assert 0 < losses < 2e-3 and 1e-4 < norms < 3e-2, (name, losses, norms)
    for one, other in (("emulated", "e4m3"), ("emulated", "no weight gradients"), ("emulated", "ends")):
        assert alone[one] != alone[other]


def test_recomputed_blocks_are_equal(alone: dict[str, Curve]) -> None:
    assert alone["recomputed"] == alone["emulated"]


def test_layouts_are_alike(alone: dict[str, Curve]) -> None:
    """To the roundings of bfloat16, which differ between layouts without these products too."""
    for (name, layout, zero, _), curve in zip(SPLIT, run_ranks(train_split, 2)[0], strict=True):
        losses, norms = apart(curve, alone[name])
        assert losses < 2e-3 and norms < 3e-2, (name, layout, zero, losses, norms)
