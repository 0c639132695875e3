"""An optimizer in the memory of the host takes the same steps, in a pipeline and in half precision as well."""

from __future__ import annotations

import dataclasses

import pytest

from megatron.config import RunConfig
from megatron.kernels.choice import Implementation
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, steps=3)
# layout, ZeRO stage, dtype or optimizer; DeepSpeed offloads on a CPU too, from its memory to its memory
CASES: list[tuple[tuple[int, int, int], int, list[str]]] = [
    ((1, 2, 1), 1, []),
    ((1, 1, 2), 2, ["--bf16"]),
    ((2, 1, 1), 3, []),
    ((1, 1, 2), 2, ["--optimizer", "schedule-free"]),
]


def offloaded(config: RunConfig) -> RunConfig:
    """The configuration that --cpu-optimizer gives on a GPU."""
    return dataclasses.replace(config, parallel=dataclasses.replace(config.parallel, offloads_optimizer=True))


def train_both(rank: int) -> list[list[list[tuple[float, float]]]]:
    """For each case, the curves with and without offloading."""
    found = []
    for layout, stage, extra in CASES:
        config = layout_config(RECIPE, layout, stage, extra)
        mesh = open_mesh(config.parallel)
        # the compiled optimizer may be one for GPUs
        mesh = dataclasses.replace(mesh, kernels=mesh.kernels.replace({"optimizer": Implementation.TORCH}))
        curves = []
        for asked in (config, offloaded(config)):
            engine = build_engine(asked, mesh)
            results = [
                engine.train_batch(local_batches(RECIPE, config, mesh, step, uneven=False), RECIPE.learning_rate)
                for step in range(RECIPE.steps)
            ]
            curves.append([(result.loss, result.gradient_norm) for result in results])
        found.append(curves)
    return found


def test_offloading_changes_no_step() -> None:
    for found in run_ranks(train_both, 2):
        for (layout, stage, extra), (plain, moved) in zip(CASES, found, strict=True):
            tolerance = 1e-2 if "--bf16" in extra else 1e-5
            for here, there in zip(plain, moved, strict=True):
                assert there == pytest.approx(here, rel=tolerance), (layout, stage)
