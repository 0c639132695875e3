"""DeepSpeed's pipeline engine, with which the executor is compared."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, layout_name, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=3, hidden_size=16)
SHORT = dataclasses.replace(RECIPE, sequence_length=8)
LAYOUTS = [(1, 2, 1), (1, 2, 2)]
OWN, OTHER = ["--hidden-dropout", "0.1"], ["--hidden-dropout", "0.1", "--pipeline-engine", "deepspeed"]


def figures_of_engines(rank: int, layout: tuple[int, int, int]) -> dict[str, list[float]]:
    """Losses and norms with each engine; the samples of the last step are shorter than those of the others."""
    found: dict[str, list[float]] = {}
    mesh: Any = None
    for name, flags in {"own": OWN, "deepspeed": OTHER}.items():
        config = layout_config(RECIPE, layout, 1, flags)
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        found[name] = []
        for step, recipe in enumerate((RECIPE, RECIPE, SHORT)):
            batches = local_batches(recipe, config, mesh, step, True)
            result = engine.train_batch(batches, recipe.learning_rate)
            found[name] += [result.loss, result.gradient_norm, engine.evaluate(batches)[0]]
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=layout_name)
def test_both_engines_train_alike(layout: tuple[int, int, int]) -> None:
    _, pp, dp = layout
    for found in run_ranks(figures_of_engines, pp * dp, layout):
        assert found["own"] == pytest.approx(found["deepspeed"], rel=1e-6)
