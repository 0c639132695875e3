"""Pairs that docs/layouts.md says work: a schedule and another value train like one process with that value."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from docs.site.layouts import PAGE, refused_on
from megatron.config import RunConfig
from megatron.config.support import AXES, words_of
from megatron.engine.engine import Engine
from megatron.model.interface.network import draw_initial_values
from megatron.objective.distillation import DistillationObjective
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.joining import open_mesh
from megatron.train.parts.distillation import teacher_of
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.helpers.samples import DEFAULT_CASES
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=4, steps=2, hidden_size=16, global_batch_size=6)
STAGES, TEACHER_LAYERS = 2, 3
# What one process has as well, so that both can be compared; fp16 needs a GPU, other objectives other samples.
VALUES = [
    value
    for axis in ("recompute", "dtype", "what is learned", "weights", "experts", "compiled blocks", "optimizer state")
    for value in list(AXES[axis])[1:]
    if value != "fp16" and "experts on" not in value  # which need more ranks: tests/parity/experts
]
PIPELINES = [name for name in list(AXES["pipeline"])[1:] if "engine" not in name]
REFUSED = refused_on(PAGE.read_text(encoding="utf-8"))
PAIRS = [
    (pipeline, value)
    for pipeline in PIPELINES
    for value in VALUES
    if not any(set(row) <= {pipeline, value} for row in REFUSED)
]
FEW = [("zbv", "a teacher too"), ("interleaved", "4 experts"), ("interleaved-zb", "some frozen")]
EXTRA = {"compiled": ["--compile-backend", "aot_eager"]}


def taught(engine: Engine, config: RunConfig) -> DistillationObjective:
    """The objective with a teacher that is wider than the network and has fewer blocks than there are chunks."""
    model = dataclasses.replace(config.model, num_layers=TEACHER_LAYERS, hidden_size=2 * RECIPE.hidden_size)
    teacher = teacher_of(model, engine)
    for _, layer in teacher.network.named_layers():
        draw_initial_values(layer, seed=1)
    assert isinstance(engine.objective, LanguageModelObjective)
    return DistillationObjective(engine.objective, teacher, teacher_weight=5.0)


def curves_of(rank: int, pairs: list[tuple[str, str]]) -> dict[tuple[str, str], list[float]]:
    """Losses, norms and an evaluation for each pair."""
    mesh: Any = None
    curves = {}
    for pair in pairs:
        stages = 1 if pair[0] == "no pipeline" else STAGES
        words = [*words_of(pair), *EXTRA.get(pair[1], []), "--hidden-dropout", "0.1"]
        config = layout_config(RECIPE, (1, stages, 1), 1, words)
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        if config.distillation.is_on:
            engine.objective = taught(engine, config)
        curve = curves[pair] = []
        for step in range(RECIPE.steps):
            batches = local_batches(RECIPE, config, mesh, step, True)
            result = engine.train_batch(batches, RECIPE.learning_rate)
            curve += [float(result.loss), float(result.gradient_norm)]
        curve.append(float(engine.evaluate(batches)[0]))
    return curves


def test_a_schedule_and_another_value_train_like_one_process(request: pytest.FixtureRequest) -> None:
    assert set(FEW) <= set(PAIRS)
    pairs = FEW if request.config.getoption("--cases") <= DEFAULT_CASES else PAIRS
    alone = [("no pipeline", value) for value in dict.fromkeys(value for _, value in pairs)]
    (expected,) = run_ranks(curves_of, 1, alone, timeout_seconds=600)
    for curves in run_ranks(curves_of, STAGES, pairs, timeout_seconds=1200):
        for (pipeline, value), curve in curves.items():
            close = 1e-3 if value == "bf16" else 1e-6
            assert curve == pytest.approx(expected["no pipeline", value], rel=close), (pipeline, value)
