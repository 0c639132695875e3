"""With the tokens of a sample split over the tensor-parallel ranks, every layout trains like one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from megatron.checkpoint import load, save
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches, train_layouts
from tests.parity.reference import Recipe

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), steps=3, learning_rate=2.0e-3)
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
SPLIT = [*DROPOUT, "--sequence-parallel"]

Curve = list[tuple[float, float]]


@pytest.fixture(scope="module")
def expected() -> Curve:
    curves: dict[int, Curve] = run_ranks(train_layouts, 1, RECIPE, (1, 1, 1), [0], DROPOUT)[0]
    return curves[0]


class OfTwoRanks(NamedTuple):
    """The results of a rank: its curves by ZeRO stage, and the losses after saving and loading."""

    curves: dict[int, Curve]
    loaded: dict[str, tuple[bool, list[float], list[float]]]


def run_all(rank: int, folder: str) -> OfTwoRanks:
    return OfTwoRanks(train_layouts(rank, RECIPE, (2, 1, 1), [0, 1, 2, 3], SPLIT), save_and_load(folder))


@pytest.fixture(scope="module")
def of_two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[OfTwoRanks]:
    return run_ranks(run_all, 2, str(tmp_path_factory.mktemp("saved")), timeout_seconds=300)


def check_curves(curves: dict[int, Curve], expected: Curve) -> None:
    """Losses and norms are those of one process, and what is clipped is."""
    assert min(norm for _, norm in expected) > RECIPE.clip
    for stage, curve in curves.items():
        for step, (found, one) in enumerate(zip(curve, expected, strict=True)):
            assert found[0] == pytest.approx(one[0], rel=4.0e-7), f"ZeRO {stage}: loss of step {step}"
            assert found[1] == pytest.approx(one[1], rel=1.0e-6), f"ZeRO {stage}: gradient norm of step {step}"


def test_layout_equals_one_process(of_two_ranks: list[OfTwoRanks], expected: Curve) -> None:
    for rank in of_two_ranks:
        check_curves(rank.curves, expected)


@pytest.mark.campaign
@pytest.mark.parametrize(
    ("layout", "zero_stages"),
    [((4, 1, 1), [0, 1, 2, 3]), ((2, 2, 1), [0, 1, 2]), ((4, 2, 1), [0, 1, 2])],
    ids=["tp4", "tp2-pp2", "tp4-pp2"],
)
def test_larger_layouts_equal_one_process(
    layout: tuple[int, int, int], zero_stages: list[int], expected: Curve
) -> None:
    tp, pp, dp = layout
    for curves in run_ranks(train_layouts, tp * pp * dp, RECIPE, layout, zero_stages, SPLIT, timeout_seconds=600):
        check_curves(curves, expected)


def save_and_load(folder: str) -> dict[str, tuple[bool, list[float], list[float]]]:
    """Trains a step and saves, loads that into the other way of computing, and trains both on.

    Returns whether weights were the same after loading, and the losses of both.
    """
    found = {}
    for name, ways in {"joined": (SPLIT, DROPOUT), "split": (DROPOUT, SPLIT)}.items():
        configs = [layout_config(RECIPE, (2, 1, 1), 1, way) for way in ways]
        first, second = (build_engine(config, open_mesh(config.parallel)) for config in configs)
        first.train_batch(local_batches(RECIPE, configs[0], first.mesh, 0, False), RECIPE.learning_rate)
        save(Path(folder) / name, 1, owned_pieces(first), {"updates": first.update_count}, first.mesh)
        record = load(Path(folder) / name / "iter_0000001", pieces_to_load(second), second.mesh)
        refresh_weights(second, record["updates"])
        is_same = all(map(torch.equal, first.module.parameters(), second.module.parameters()))
        losses = []
        for engine, config in zip((first, second), configs, strict=True):
            batches = [local_batches(RECIPE, config, engine.mesh, step, False) for step in (1, 2)]
            evaluated = engine.evaluate(batches[0])[0]
            trained = [engine.train_batch(batch, RECIPE.learning_rate).loss for batch in batches]
            losses.append([evaluated, *trained])
        found[name] = (is_same, *losses)
    return found


def test_checkpoints_load_with_and_without(of_two_ranks: list[OfTwoRanks]) -> None:
    for rank in of_two_ranks:
        for is_same, own, other in rank.loaded.values():
            assert is_same and own == pytest.approx(other, rel=4.0e-7)
