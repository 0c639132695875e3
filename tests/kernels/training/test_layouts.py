"""Training with compiled norms in layouts of two ranks: the losses and gradient norms of torch's."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from megatron.kernels.choice import Implementation, Kernels
from megatron.kernels.native.library import Library, library
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, steps=4)
# tp, pp, dp, ZeRO stage and flags. Which rank has which tokens, and where the sum of a stage's last block is sent,
# decide who adds the bias of a branch; with ZeRO-3 its product does.
CASES: dict[str, tuple[tuple[int, int, int], int, list[str]]] = {
    "tp2": ((2, 1, 1), 1, []),
    "tp2, sequence parallel": ((2, 1, 1), 1, ["--sequence-parallel"]),
    "pp2": ((1, 2, 1), 1, []),
    "pp2, zb-h1": ((1, 2, 1), 0, ["--pipeline-schedule", "zb-h1"]),
    "dp2, ZeRO 2": ((1, 1, 2), 2, []),
    "dp2, ZeRO 3": ((1, 1, 2), 3, []),
}


def _curves(rank: int, folder: Path, settings: Path) -> dict[tuple[str, Implementation], list[tuple[float, float]]]:
    torch.set_num_threads(1)
    assert library(folder) is not None
    curves = {}
    for name, (layout, stage, flags) in CASES.items():
        if stage == 3:
            flags = [*flags, "--deepspeed_config", str(settings)]
        config = layout_config(RECIPE, layout, stage, flags)
        mesh = open_mesh(config.parallel)
        for norm in (Implementation.TORCH, Implementation.CSRC):
            engine = build_engine(config, dataclasses.replace(mesh, kernels=Kernels(norm=norm)))
            curves[name, norm] = []
            for step in range(RECIPE.steps):
                result = engine.train_batch(local_batches(RECIPE, config, mesh, step, False), RECIPE.learning_rate)
                curves[name, norm].append((result.loss, result.gradient_norm))
    return curves


@pytest.fixture(scope="module")
def curves(
    compiled: Library, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[tuple[str, Implementation], list[tuple[float, float]]]]:
    settings = tmp_path_factory.mktemp("settings") / "deepspeed.json"  # with ZeRO-3, biases are divided as well
    settings.write_text(json.dumps({"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}))
    return run_ranks(_curves, 2, compiled.folder, settings)


@pytest.mark.full
@pytest.mark.parametrize("name", CASES)
def test_losses_do_not_depend_on_the_norms(
    curves: list[dict[tuple[str, Implementation], list[tuple[float, float]]]], name: str
) -> None:
    for rank in curves:
        for found, expected in zip(rank[name, Implementation.CSRC], rank[name, Implementation.TORCH], strict=True):
            assert found[0] == pytest.approx(expected[0], rel=1e-6) and found[1] == pytest.approx(expected[1], rel=1e-5)
