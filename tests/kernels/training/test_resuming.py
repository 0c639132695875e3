"""Training in DeepSpeed with the compiled AdamW, norm, embedding and initial values, resumed with the others."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import load, save
from megatron.engine.state import owned_pieces, pieces_to_load, refresh_weights
from megatron.kernels.choice import Implementation, Kernels
from megatron.kernels.native.library import Library, library
from megatron.kernels.optimizer import AdamW
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, learning_rate=3e-3)
CSRC, TORCH = Implementation.CSRC, Implementation.TORCH
Curve = list[tuple[float, float]]
# ZeRO stages and flags for each tp, pp, dp. The rank that has the tokens, and the stage that receives the sum of the
# last block, decide where the bias of a branch is added; with ZeRO-3 its product adds it.
STAGES: dict[tuple[int, int, int], list[tuple[int, list[str]]]] = {
    (1, 1, 2): [(0, []), (1, ["--bf16"]), (2, []), (3, [])],
    (2, 1, 1): [(0, []), (0, ["--sequence-parallel"])],
    (1, 2, 1): [(0, []), (0, ["--pipeline-schedule", "zb-h1"])],
}


def train(rank: int, layout: tuple[int, int, int], folder: str, kernels_at: str) -> dict[str, list[Curve]]:
    """Loss and norm of five steps, resumed after three, in some ZeRO stages: with one implementation for the first part
    and another for the second.
    """
    assert library(Path(kernels_at)) is not None
    curves: dict[str, list[Curve]] = {}
    for stage, flags in STAGES[layout]:
        if stage == 3:  # biases are divided as well
            flags = ["--deepspeed_config", str(Path(folder) / "deepspeed.json")]
        config = layout_config(RECIPE, layout, stage, flags)
        mesh = open_mesh(config.parallel)
        for order in ((TORCH, TORCH), (TORCH, CSRC), (CSRC, TORCH)):
            curve: Curve = []
            where = Path(folder) / f"{len(curves)} {order}"
            for kind, first, last in ((order[0], 0, 3), (order[1], 3, 5)):
                kernels = Kernels(norm=kind, optimizer=kind, embedding=kind, initial_values=kind)
                engine = build_engine(config, dataclasses.replace(mesh, kernels=kernels))
                assert isinstance(engine.optimizer, AdamW) == (kind is CSRC)
                if first:
                    record = load(where / f"iter_{first:07d}", pieces_to_load(engine), mesh)
                    refresh_weights(engine, record["updates"])
                for step in range(first, last):
                    batches = local_batches(RECIPE, config, mesh, step, True)
                    result = engine.train_batch(batches, RECIPE.learning_rate)
                    curve.append((result.loss, result.gradient_norm))
                save(where, last, owned_pieces(engine), {"updates": engine.update_count}, mesh)
            curves.setdefault(f"{stage} {flags}", []).append(curve)
    return curves


@pytest.mark.full
@pytest.mark.parametrize("layout", STAGES)
def test_curves_do_not_depend_on_the_implementation(
    compiled: Library, layout: tuple[int, int, int], tmp_path: Path
) -> None:
    settings = '{"zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0}}'
    (tmp_path / "deepspeed.json").write_text(settings)
    for curves in run_ranks(train, 2, layout, str(tmp_path), str(compiled.folder)):
        for case, (expected, *others) in curves.items():
            tolerance = 2e-3 if "bf16" in case else 1e-6
            for curve in others:
                assert torch.tensor(curve).shape == (5, 2)
                for own, other in zip(curve, expected, strict=True):
                    assert own[0] == pytest.approx(other[0], rel=tolerance), case
                    assert own[1] == pytest.approx(other[1], rel=10 * tolerance), case
