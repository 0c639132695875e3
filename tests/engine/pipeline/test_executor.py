"""A pipeline computes every block as often as it must, and no backward pass where nothing is trained."""

from __future__ import annotations

import dataclasses
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest

from megatron.engine.freezing import FreezeSpec
from megatron.engine.micro_batch import DeviceBatch
from megatron.engine.pipeline import executor
from megatron.engine.pipeline.chunks import Chunks
from megatron.model.blocks.transformer import TransformerBlock
from megatron.model.interface.network import LayerKind, parameter_names
from megatron.model.networks import network_layers
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.parallel.schedule.actions import Kind, Placement
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=5, hidden_size=16, global_batch_size=10)


def batches_that_stay(rank: int) -> int:
    """How many micro-batches of a step and of an evaluation are still there after it, with no collection of garbage."""
    config = layout_config(RECIPE, (1, 2, 1), 0, ["--pipeline-schedule", "zbv"])
    engine = build_engine(config, open_mesh(config.parallel))
    batches = local_batches(RECIPE, config, engine.mesh, 0, True)
    prepared: list[weakref.ref[Any]] = []
    prepare = engine._prepare

    def noted(given: Any) -> list[DeviceBatch]:
        made = prepare(given)
        prepared.extend(map(weakref.ref, made))
        return made

    engine._prepare = noted  # type: ignore[method-assign]
    gc.disable()
    engine.train_batch(batches, RECIPE.learning_rate)
    engine.evaluate(batches)
    assert len(prepared) == 2 * len(batches)
    return sum(one() is not None for one in prepared)


def test_the_batches_of_a_step_are_freed_with_it() -> None:
    assert run_ranks(batches_that_stay, 2) == [0, 0]


@pytest.mark.parametrize("stages", [2, 4])
def test_gradients_of_two_stages_do_not_take_turns_with_hidden_states(stages: int) -> None:
    """They travel in the group of all ranks; among more stages, each rank sends and receives to and from others."""
    world: Any
    pipeline: Any
    mesh, world, pipeline = ParallelMesh.at(standard_axes(4, pp=stages), 0), object(), object()
    pp = dataclasses.replace(mesh.pp, group=pipeline)
    nothing: Any = None
    one = executor.Executor(nothing, pp, dataclasses.replace(mesh.world, group=world), nothing, print)
    assert one.axis_of(Kind.SEND_FORWARD) is one.axis_of(Kind.RECEIVE_FORWARD) is pp
    for kind in (Kind.SEND_BACKWARD, Kind.RECEIVE_BACKWARD):
        assert one.axis_of(kind) == dataclasses.replace(pp, group=world if stages == 2 else pipeline)


def block_runs(rank: int) -> tuple[int, int, int]:
    """How often blocks run in a step of a schedule with split backward passes and recomputation, and the blocks; then
    how many messages are sent in a step where all of the first stage is frozen.
    """
    flags = ["--pipeline-schedule", "zbv", "--checkpoint-activations"]
    config = layout_config(RECIPE, (1, 2, 1), 0, flags)
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    batches = local_batches(RECIPE, config, mesh, 0, True)
    calls = []

    def counted(run: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            calls.append(run)
            return run(*given)

        return call

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TransformerBlock, "_run_sum", counted(TransformerBlock._run_sum))
        engine.train_batch(batches, RECIPE.learning_rate)
    runs = len(calls)
    layers = network_layers(config.model, mesh)
    frozen = parameter_names(Chunks.of(layers, Placement.loop(2, 1), 0).specs)
    half = build_engine(layout_config(RECIPE, (1, 2, 1), 0, []), mesh, FreezeSpec(frozenset(frozen)))
    calls.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "start_send", counted(executor.start_send))
        assert half.train_batch(batches, RECIPE.learning_rate).gradient_norm > 0
    return runs, sum(spec.kind is LayerKind.BLOCK for spec, _ in engine.stack.named_layers()), len(calls)


def test_nothing_is_computed_or_sent_that_is_not_needed() -> None:
    micro_batches = RECIPE.global_batch_size // RECIPE.micro_batch_size
    for rank, (runs, blocks, sent) in enumerate(run_ranks(block_runs, 2)):
        assert blocks > 0 and runs == 2 * blocks * micro_batches, "once forward and once to be recomputed"
        assert sent == (0 if rank else micro_batches), "hidden states, and no gradients of them"
