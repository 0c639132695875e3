"""The cells of docs/layouts.md: a pipeline and any value that goes with it train like one process with that value."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from deepspeed.accelerator import get_accelerator

from docs.site.layout_survey import AXES, words_of
from docs.site.layouts import FEW, PAGE, pair_tests, refused_on
from megatron.config import Machine, RunConfig, TokenizerFacts, parse, resolve
from megatron.data.loader import Batch, predicted_positions
from megatron.engine.engine import Engine
from megatron.model.interface.network import draw_initial_values
from megatron.model.networks import network_layers
from megatron.objective.distillation import DistillationObjective
from megatron.objective.language_model import LanguageModelObjective
from megatron.parallel.joining import open_mesh
from megatron.parallel.mesh import ParallelMesh
from megatron.train.callbacks.distillation import teacher_of
from megatron.train.start_up.engine_opening import build_engine, find_freezing
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_flags, local_batches
from tests.parity.reference import Recipe

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), num_layers=4, steps=2, hidden_size=16)
TEACHER_LAYERS = 3
COMMON = ["--hidden-dropout", "0.1", "--pad-vocab-size-to", "160"]
# More flags of a value, so that two steps show it.
EXTRA = {
    "bf16 with fp8 products": ["--fp8-emulation"],
    "compiled": ["--compile-backend", "aot_eager"],
    "curriculum": ["--curriculum-min-length", "8", "--curriculum-steps", "2"],
    "fp16": ["--hysteresis", "1"],
    # Without a bias of the keys: its gradient is rounding alone, of which Lion would take the sign.
    "lion": ["--group-query-attention", "--num-query-groups", "2", "--no-add-qkv-bias"],
}
OVERFLOWING = 2**20  # a loss scale with which the first step overflows, the second with half of it, not the third
CLOSE = {"bf16": 1e-3, "bf16 with fp8 products": 3e-3, "fp16": 1e-3}
# Axes whose values change nothing but the layout: one process has the first of each.
LAYOUT_AXES = ("ZeRO", "tensor parallelism", "sequences", "recompute")
CELLS = pair_tests([frozenset(values) for values in refused_on(PAGE.read_text(encoding="utf-8"))])
# Values but the first of each axis, which all pairs have of the other axes.
PAIRS = {
    value: [pipeline for pipeline in AXES["pipeline"] if (pipeline, value) in CELLS]
    for axis, values in AXES.items()
    for value in list(values)[1:]
    if axis != "pipeline"
}

Pair = tuple[str, str]


def alone_words(value: str) -> list[str]:
    """The flags of a value that one process has as well."""
    if any(value in AXES[axis] for axis in LAYOUT_AXES):
        return []
    return words_of(["4 experts" if value in AXES["experts"] else value])


def config_of(pair: Pair, is_alone: bool) -> RunConfig:
    """The resolved configuration of a pair; at least two ranks train it, so that there is something to divide."""
    words = alone_words(pair[1]) if is_alone else words_of(pair)
    flags = layout_flags(RECIPE, (1, 1, 1), 1, [*words, *COMMON, *EXTRA.get(pair[1], [])])
    parallel = parse(flags).parallel
    world_size = 1 if is_alone else max(2, parallel.replica_size * parallel.expert_model_parallel_size)
    # Replicas multiply gradients by their number, since the engine averages them.
    request = parse([*flags, "--initial-loss-scale", str(OVERFLOWING * parallel.replica_size // world_size)])
    machine = Machine(device_type="cpu", world_size=world_size, supports_fp16=True, supports_bf16=True)
    return resolve(request, machine, TokenizerFacts(vocab_size=RECIPE.vocab_size, eod_id=0, fingerprint="none"))


def taught(engine: Engine, config: RunConfig) -> DistillationObjective:
    """The objective with a teacher that is wider than the network and has fewer blocks than there are chunks."""
    model = dataclasses.replace(config.model, num_layers=TEACHER_LAYERS, hidden_size=2 * RECIPE.hidden_size)
    teacher = teacher_of(model, engine)
    for _, layer in teacher.network.named_layers():
        draw_initial_values(layer, seed=1)
    assert isinstance(engine.objective, LanguageModelObjective)
    return DistillationObjective(engine.objective, teacher, teacher_weight=5.0)


def batches_of(config: RunConfig, mesh: ParallelMesh, step: int) -> list[Batch]:
    """This rank's micro-batches: of the curriculum's length, or padded and with the places that an encoder predicts."""
    recipe = dataclasses.replace(RECIPE, sequence_length=config.optim.length_of_step(step + 1))
    batches = local_batches(recipe, config, mesh, step, uneven=True)
    return [masked(batch) for batch in batches] if config.loss.objective == "masked" else batches


def masked(batch: Batch) -> Batch:
    """A batch whose samples end with one to three tokens of padding."""
    places = np.arange(RECIPE.sequence_length)
    padding = places >= RECIPE.sequence_length - 1 - batch.sample_ids[:, None] % 3
    loss_mask = np.where(padding | (places == 0), np.float32(0), batch.loss_mask)
    predicted = predicted_positions(loss_mask, RECIPE.sequence_length)
    return dataclasses.replace(batch, loss_mask=loss_mask, segment_ids=padding.astype(np.int64), predicted=predicted)


@contextlib.contextmanager
def frozen_weights_stay(engine: Engine, frozen: frozenset[str]) -> Iterator[None]:
    """Checks that what is frozen, and nothing else, is as it was before the block."""
    before = {each.global_name: each.detach().clone() for each in engine.parameters()} if frozen else {}
    yield
    for each in engine.parameters() if frozen else ():
        assert torch.equal(each, before[each.global_name]) == (each.global_name in frozen), each.global_name


def curves_of(rank: int, pairs: list[Pair], is_alone: bool) -> dict[Pair, list[float]]:
    """Losses, norms, scales of the loss and an evaluation for each pair."""
    curves = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        for pair in pairs:
            config = config_of(pair, is_alone)
            mesh = open_mesh(config.parallel)
            network = network_layers(config.model, mesh)
            freezing = find_freezing(config.finetuning, config.loading, network, mesh, None)
            assert bool(freezing.frozen) == (pair[1] == "some frozen")
            engine = build_engine(config, mesh, freezing)
            if config.distillation.is_on:
                engine.objective = taught(engine, config)
            curve = curves[pair] = []
            with frozen_weights_stay(engine, freezing.frozen):
                for step in range(RECIPE.steps + config.precision.fp16):
                    batches = batches_of(config, mesh, step)
                    result = engine.train_batch(batches, RECIPE.learning_rate)
                    scale = result.loss_scale * config.parallel.data_parallel_size if config.precision.fp16 else 1.0
                    curve += [float(result.loss), float(result.gradient_norm), scale]
            curve.append(float(engine.evaluate(batches)[0]))
    return curves


def check(pairs: list[Pair]) -> None:
    """Trains pairs on as many ranks as each needs, and each value in one process."""
    alone = [("no pipeline", value) for value in dict.fromkeys(value for _, value in pairs)]
    (expected,) = run_ranks(curves_of, 1, alone, True, timeout_seconds=60 + 10 * len(alone))
    by_size: dict[int, list[Pair]] = {}
    for pair in pairs:
        by_size.setdefault(config_of(pair, False).parallel.world_size, []).append(pair)
    for size, some in by_size.items():
        for curves in run_ranks(curves_of, size, some, False, timeout_seconds=60 + 20 * len(some)):
            for pair, curve in curves.items():
                one = expected["no pipeline", pair[1]]
                overflows = [not math.isfinite(norm) for norm in one[1:-1:3]]
                assert overflows == ([True, True, False] if pair[1] == "fp16" else [False, False]), pair
                assert curve == pytest.approx(one, rel=CLOSE.get(pair[1], 1e-6), nan_ok=True), pair


@pytest.mark.full
def test_a_few_pairs_train_like_one_process() -> None:
    assert all(pipeline in PAIRS[value] for pipeline, value in FEW)
    check(list(FEW))


@pytest.mark.campaign
@pytest.mark.parametrize("value", PAIRS)
def test_a_value_trains_with_every_pipeline(value: str) -> None:
    check([(pipeline, value) for pipeline in PAIRS[value]])
