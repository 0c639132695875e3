"""Passes of a pipeline's chunks as graphs, for which tapes of operations stand on a CPU."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import pytest
import torch
from deepspeed.accelerator import get_accelerator

from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.engine.engine import Engine
from megatron.engine.pipeline.chunk_graphs import GraphedChunkRunner
from megatron.engine.pipeline.passes import PipelinePasses
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.tapes import FailingCapturer, TapeCapturer
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_flags, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=4, hidden_size=16, micro_batch_size=1, global_batch_size=4)
STEPS = 5
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]

# ZeRO stage, flags, and how many sets of graphs each rank holds.
CASES: dict[str, tuple[int, list[str], tuple[int, int]]] = {
    "1f1b, fp32": (0, DROPOUT, (2, 1)),
    "1f1b, fp16": (1, ["--fp16", "--initial-loss-scale", "1048576", "--hysteresis", "1"], (2, 1)),
    "interleaved, bf16": (
        1,
        ["--bf16", "--num-layers-per-virtual-pipeline-stage", "1", "--checkpoint-activations"],
        (6, 4),
    ),
    "zb-h1, bf16": (2, ["--bf16", "--pipeline-schedule", "zb-h1"], (2, 2)),
    "zbv, fp32": (0, ["--pipeline-schedule", "zbv"], (4, 4)),
    "zbv, bf16, frozen": (1, ["--bf16", "--pipeline-schedule", "zbv", "--freeze", "embedding.*"], (4, 4)),
}


class Course(NamedTuple):
    """Results of a run of the engine on one rank."""

    figures: list[tuple[float, float]]  # loss and gradient norm of each step, and an evaluation after the third
    sets: list[int]  # held after each step
    captures: int
    released: int
    addresses: list[set[int]]  # that graphs wrote to in each of the last two steps


def courses(rank: int, names: list[str]) -> dict[str, tuple[Course, Course]]:
    """Each case without and with graphs."""
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        return {name: (course(*CASES[name][:2], None), course(*CASES[name][:2], TapeCapturer())) for name in names}


def failing_courses(rank: int, name: str, captures: list[int]) -> list[Course]:
    """A case without graphs, then with captures of which one fails on the second rank."""
    torch.set_num_threads(1)
    failing = [FailingCapturer(capture if rank == 1 else None, 5) for capture in captures]
    return [course(*CASES[name][:2], capturer) for capturer in (None, *failing)]


def course(zero_stage: int, flags: list[str], capturer: TapeCapturer | None) -> Course:
    """Five steps of four micro-batches."""
    machine = Machine(device_type="cpu", world_size=2, supports_fp16=True, supports_bf16=True)
    tokenizer = TokenizerFacts(vocab_size=RECIPE.vocab_size, eod_id=0, fingerprint="none")
    config = resolve(parse(layout_flags(RECIPE, (1, 2, 1), zero_stage, flags)), machine, tokenizer)
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    if capturer is not None:
        engine.passes.use_graphs(capturer)
    figures, sets, addresses = [], [], []
    for step in range(STEPS):
        batches = local_batches(RECIPE, config, mesh, step, False)
        result = engine.train_batch(batches, RECIPE.learning_rate)
        figures.append((float(result.loss or 0.0), result.gradient_norm))
        if step == 2:
            figures.append(engine.evaluate(batches))
        runner = runner_of(engine)
        if isinstance(runner, GraphedChunkRunner):
            sets.append(runner.count)
            held = [each for kept in runner._sets.values() for each in kept]
            written = [tensor for each in held for tensor in (each.output, *(value for _, value in each.gradients[0]))]
            addresses.append({tensor.data_ptr() for tensor in written if tensor is not None})
    if isinstance(runner, GraphedChunkRunner):
        runner.release()
    tapes = [] if capturer is None else capturer.tapes
    return Course(figures, sets, len(tapes), sum(tape.is_released for tape in tapes), addresses[-2:])


def runner_of(engine: Engine) -> object:
    """What runs the chunks of a rank."""
    assert isinstance(engine.passes, PipelinePasses)
    return engine.passes.executor.runner


@pytest.mark.full
def test_graphs_of_chunks_compute_the_same_bits_at_the_same_addresses() -> None:
    ranks = run_ranks(courses, 2, list(CASES))
    for name, (*_, most) in CASES.items():
        for rank, found in enumerate(ranks):
            eager, graphed = found[name]
            assert repr(graphed.figures) == repr(eager.figures), (name, rank)
            assert graphed.sets[0] == 0 and graphed.sets[1:] == [most[rank]] * (STEPS - 1), (name, rank, graphed.sets)
            assert graphed.captures == graphed.released > 0, name
            first, second = graphed.addresses
            assert first == second and len(first) > 0, name


def test_passes_that_cannot_be_captured_run_as_they_are() -> None:
    # Captures of a set: forward, the half of the backward pass for the input, and the half for the weights.
    for rank, (eager, *failed) in enumerate(run_ranks(failing_courses, 2, "zb-h1, bf16", [0, 1, 2, 4])):
        assert [each.figures for each in failed] == [eager.figures] * 4
        assert [each.sets[-1] for each in failed] == [0 if rank == 1 else CASES["zb-h1, bf16"][2][0]] * 4
