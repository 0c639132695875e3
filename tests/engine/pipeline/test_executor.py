"""Pipelines train like one process, whatever their schedule, and do what the schedule says."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from megatron.model.blocks.transformer import TransformerBlock
from megatron.model.interface.network import LayerKind
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=5, steps=3, hidden_size=16, global_batch_size=10)
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
CASES = {
    "1f1b": [],
    "zb-h1": ["--checkpoint-activations"],
    "interleaved": [],
    "interleaved-zb": [],
    "zbv": ["--checkpoint-activations"],
    "v-half": [],
    "v-1f1b": [],
}


def train(mesh: Any, config: Any) -> list[float]:
    """Losses and norms of each step, with an evaluation between, and last the evaluated loss."""
    engine = build_engine(config, mesh)
    figures: list[float] = []
    for step in range(RECIPE.steps):
        batches = local_batches(RECIPE, config, mesh, step, True)
        if step == 1:
            figures += [*engine.evaluate(batches[:1])]
        result = engine.train_batch(batches, RECIPE.learning_rate)
        figures += [result.loss, result.gradient_norm]
    return [*figures, engine.evaluate(batches)[0]]


def train_cases(rank: int, pp: int, cases: dict[str, list[str]]) -> dict[str, list[float]]:
    mesh: Any = None
    curves = {}
    for schedule, flags in cases.items():
        flags = [*DROPOUT, "--pipeline-schedule", schedule, *flags]
        config = layout_config(RECIPE, (1, pp, 1), 0, flags)
        mesh = mesh or open_mesh(config.parallel)
        curves[schedule] = train(mesh, config)
    return curves


def block_runs(rank: int) -> tuple[int, int]:
    """How often blocks run in a step of a schedule with split backward passes and recomputation, and the blocks."""
    flags = ["--pipeline-schedule", "zbv", "--checkpoint-activations"]
    config = layout_config(RECIPE, (1, 2, 1), 0, flags)
    engine = build_engine(config, open_mesh(config.parallel))
    runs = 0
    once = TransformerBlock._run_sum

    def counted(*given: Any) -> Any:
        nonlocal runs
        runs += 1
        return once(*given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerBlock, "_run_sum", counted)
        engine.train_batch(local_batches(RECIPE, config, engine.mesh, 0, True), RECIPE.learning_rate)
    return runs, sum(spec.kind is LayerKind.BLOCK for spec, _ in engine.stack.named_layers())


def test_a_block_runs_once_and_once_more_to_be_recomputed() -> None:
    micro_batches = RECIPE.global_batch_size // RECIPE.micro_batch_size
    for runs, blocks in run_ranks(block_runs, 2):
        assert blocks > 0 and runs == 2 * blocks * micro_batches


def test_every_schedule_trains_like_one_process() -> None:
    (alone,) = run_ranks(train_cases, 1, 1, {"1f1b": []})
    for curves in run_ranks(train_cases, 2, 2, CASES):
        for schedule, curve in curves.items():
            assert curve == pytest.approx(alone["1f1b"], rel=1e-6), schedule
