"""Micro-batches as CUDA graphs: when they are, what they compute, and what becomes of their memory.

On a CPU a tape of operations stands for a graph; the last test runs real ones.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn

from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.data.loader import Batch
from megatron.device import GraphCapturer
from megatron.engine.cuda_graphs import MOST_GRAPHS, WARM_UP_MICRO_BATCHES, MicroBatchGraphs, graph_refusal
from megatron.engine.engine import Engine
from megatron.engine.micro_batch import DeviceBatch
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine, refusal_of_graphs
from tests.engine.tapes import TapeCapturer
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_flags, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, global_batch_size=4)
STEPS = 5

REFUSALS = {
    "": "",
    "--attention-dropout 0.1": "fused attention draws its dropout from a generator",
    "--attention-dropout 0.1 --no-fused-attention": "",
    "--zero-stage 3": "ZeRO stage 3 fetches the weights of a layer by hooks",
    "--fp16": "",
    "--num-experts 4": "the host reads how many tokens an expert gets",
    "--num-experts 4 --moe-expert-capacity-factor 1.25": "",
    "--kd --load-teacher teacher": "the teacher of a distillation runs between forward and loss",
    "--reset-attention-mask": "attention with documents",
    "--attention-window 4": "attention with documents",
    "--position-embedding-type alibi": "attention with documents",
    "--compile": "programs of --compile have not been captured yet",
}
LAYOUT_REFUSALS = {
    "--pipeline-model-parallel-size 2": "",
    "--pipeline-model-parallel-size 2 --pipeline-engine deepspeed": "DeepSpeed's pipeline engine runs the stages",
    "--tensor-model-parallel-size 2 --distributed-backend gloo": "messages of gloo inside the blocks cannot be",
    "--tensor-model-parallel-size 2": "",
    "--pipeline-schedule zbv --pipeline-model-parallel-size 2 --num-layers 4": "",
    "--tensor-model-parallel-size 2 --sequence-parallel": "",
    "--num-experts 4 --moe-expert-capacity-factor 1 --expert-model-parallel-size 2 --distributed-backend gloo": (
        "messages of gloo inside the blocks cannot be"
    ),
    "--context-parallel-size 2": "keys and values travel in a ring",
    "--context-parallel-size 2 --cp-comm-type a2a": "",
    "--ds-sequence-parallel-size 2": "",
    "--ds-sequence-parallel-size 2 --distributed-backend gloo": "messages of gloo inside the blocks cannot be",
}


def refusal(flags: str, world_size: int, device_type: str = "cuda", *, by_hooks: bool = False) -> str:
    """The reason for these flags on GPUs; empty if there is none."""
    machine = Machine(device_type=device_type, world_size=world_size, supports_fp16=True, supports_bf16=True)
    tokenizer = TokenizerFacts(vocab_size=150, eod_id=0, fingerprint="none")
    words = layout_flags(RECIPE, (1, 1, 1), 1, flags.split())
    return graph_refusal(resolve(parse(words), machine, tokenizer), device_type, by_hooks=by_hooks) or ""


@pytest.mark.parametrize("flags", REFUSALS)
def test_what_stands_in_the_way(flags: str) -> None:
    reason = refusal(flags, 1)
    assert reason.startswith(REFUSALS[flags]) and bool(reason) == bool(REFUSALS[flags])


@pytest.mark.parametrize("flags", LAYOUT_REFUSALS)
def test_what_stands_in_the_way_between_ranks(flags: str) -> None:
    reason = refusal(flags, 2)
    assert reason.startswith(LAYOUT_REFUSALS[flags]) and bool(reason) == bool(LAYOUT_REFUSALS[flags])


def test_the_device_and_hooks_stand_in_the_way() -> None:
    assert refusal("", 1, "cpu") == "there is no GPU"
    assert refusal("", 1, by_hooks=True).startswith("DeepSpeed takes the gradients of ZeRO stage 1 in hooks")


class Course(NamedTuple):
    """What a run of the engine showed.

    Attributes:
        figures: loss and gradient norm of each step, with the loss of an evaluation between the second and the third.
        captures: how often a micro-batch was captured, and how many tapes were released.
        refusal: why a run with these settings would not use graphs here.
    """

    figures: list[tuple[float, float]]
    captures: int
    released: int
    refusal: str | None


CASES: dict[str, tuple[int, list[str]]] = {
    "fp32 zero 0": (0, ["--hidden-dropout", "0.1"]),
    "bf16 zero 1": (1, ["--bf16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]),
    "bf16 zero 1, recomputed, frozen": (1, ["--bf16", "--checkpoint-activations", "--freeze", "embedding.*"]),
    "fp32 zero 2, smoothing and z-loss": (2, ["--z-loss-coeff", "0.01", "--label-smoothing", "0.1"]),
    "experts with a capacity": (0, ["--num-experts", "4", "--moe-expert-capacity-factor", "1.0"]),
}
TENSOR_PARALLEL = ["--tensor-model-parallel-size", "2"]
CASES_OF_TWO: dict[str, tuple[int, list[str]]] = {
    "tensor parallelism": (1, ["--bf16", *TENSOR_PARALLEL]),
    "sequence parallelism": (0, [*TENSOR_PARALLEL, "--sequence-parallel", "--hidden-dropout", "0.1"]),
    "ulysses": (1, ["--ds-sequence-parallel-size", "2", "--hidden-dropout", "0.1"]),
    "ulysses, rotary": (2, ["--bf16", "--ds-sequence-parallel-size", "2", "--position-embedding-type", "rope"]),
}


def courses(rank: int, cases: dict[str, tuple[int, list[str]]]) -> dict[str, tuple[Course, Course]]:
    """Each case without and with graphs."""
    torch.set_num_threads(1)
    return {name: (course(*case, None), course(*case, TapeCapturer())) for name, case in cases.items()}


def course(zero_stage: int, flags: list[str], capturer: TapeCapturer | None) -> Course:
    """Five steps of two micro-batches; in the fourth all have half the length."""
    ranks = 2 if (zero_stage, flags) in CASES_OF_TWO.values() else 1
    machine = Machine(device_type="cpu", world_size=ranks, supports_fp16=False, supports_bf16=True)
    tokenizer = TokenizerFacts(vocab_size=RECIPE.vocab_size, eod_id=0, fingerprint="none")
    config = resolve(parse(layout_flags(RECIPE, (1, 1, 1), zero_stage, flags)), machine, tokenizer)
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    if capturer is not None:
        engine.use_graphs(capturer)
    figures = []
    for step in range(STEPS):
        batches = local_batches(RECIPE, config, mesh, step, False)
        if step == 2:
            figures.append(engine.evaluate(batches))
        if step == 3:
            batches = [_half(each) for each in batches]
        result = engine.train_batch(batches, RECIPE.learning_rate)
        figures.append((float(result.loss or 0.0), result.gradient_norm))
    tapes = [] if capturer is None else capturer.tapes
    return Course(figures, len(tapes), sum(tape.is_released for tape in tapes), refusal_of_graphs(config, engine))


def _half(batch: Batch) -> Batch:
    """The first half of each of its samples."""
    parts = (np.ascontiguousarray(each[:, :8]) for each in (batch.tokens, batch.labels, batch.loss_mask))
    return dataclasses.replace(batch, **dict(zip(("tokens", "labels", "loss_mask"), parts, strict=True)))


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Course, Course]]:
    return run_ranks(courses, 1, CASES)[0] | run_ranks(courses, 2, CASES_OF_TWO)[1]


@pytest.mark.parametrize("case", [*CASES, *CASES_OF_TWO])
def test_graphs_train_as_the_same_steps_without(case: str, results: dict[str, tuple[Course, Course]]) -> None:
    eager, graphed = results[case]
    assert graphed.figures == eager.figures
    assert graphed.captures == 1 and eager.captures == graphed.released == 0
    assert graphed.refusal == "there is no GPU"


class Line(nn.Module):
    """Two parameters, the second of which only the first input meets."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.shift = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """A loss, and its value as the only sum."""
        loss = (batch.inputs[0].sum(dim=0) * self.slope).sum() + (self.shift.square() if batch.targets else 0)
        return loss, loss.detach().double().reshape(1)


def numbers(rows: int, value: float, *, shifted: bool = True) -> DeviceBatch:
    """A batch of equal inputs."""
    targets = (torch.ones(1),) if shifted else ()
    return DeviceBatch((torch.full((rows, 2), value),), (), (rows, 2), 0, targets, ())


def graphs_of(line: Line) -> tuple[MicroBatchGraphs, TapeCapturer]:
    """Its graphs, and what they are captured with."""
    capturer = TapeCapturer()
    return MicroBatchGraphs(line.parameters(), line.forward, capturer), capturer


def test_a_graph_computes_what_its_inputs_say_at_the_same_addresses() -> None:
    line = Line()
    graphs, capturer = graphs_of(line)
    addresses = set()
    for number in range(WARM_UP_MICRO_BATCHES + 3):
        outcome = graphs.run(numbers(4, float(number)), "settings")
        assert float(outcome.loss) == 20.0 * number + 1.0 == float(outcome.sums)
        slope, shift = outcome.gradients
        assert slope is not None and shift is not None and line.slope.grad is None
        assert slope.tolist() == [4.0 * number] * 2 and float(shift) == 2.0
        graphs.give(outcome, adds_up=False)
        assert line.slope.grad is slope
        line.zero_grad(set_to_none=True)
        if number >= WARM_UP_MICRO_BATCHES:
            addresses.add((slope.data_ptr(), shift.data_ptr(), outcome.loss.data_ptr()))
    assert capturer.warm_ups == WARM_UP_MICRO_BATCHES and len(capturer.tapes) == 1 and len(addresses) == 1


def test_gradients_lie_in_memory_as_their_parameters() -> None:
    matrix = nn.Parameter(torch.ones(2, 3))

    def forward(batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (matrix.t() @ batch.inputs[0].t()).sum()  # its gradient is a transposed view
        return loss, loss.detach().reshape(1)

    graphs = MicroBatchGraphs([matrix], forward, TapeCapturer())
    for _ in range(WARM_UP_MICRO_BATCHES + 1):
        (gradient,) = graphs.run(numbers(1, 2.0), None).gradients
        assert gradient is not None and gradient.stride() == (3, 1) and gradient.tolist() == [[2.0] * 3] * 2


def test_weights_are_read_where_the_optimizer_changes_them() -> None:
    line = Line()
    graphs, _ = graphs_of(line)
    for _ in range(WARM_UP_MICRO_BATCHES + 1):
        graphs.run(numbers(1, 1.0), None)
    with torch.no_grad():
        line.slope += 10.0
    assert float(graphs.run(numbers(1, 1.0), None).loss) == 26.0


def test_gradients_that_add_up_do_not_lie_where_the_graph_writes() -> None:
    line = Line()
    graphs, _ = graphs_of(line)
    for _ in range(WARM_UP_MICRO_BATCHES):
        graphs.run(numbers(1, 1.0, shifted=False), None)
    for value in (1.0, 2.0, 4.0):
        outcome = graphs.run(numbers(1, value, shifted=False), None)
        assert outcome.gradients[1] is None
        graphs.give(outcome, adds_up=True)
    assert line.slope.grad is not None and line.slope.grad.tolist() == [7.0, 7.0] and line.shift.grad is None


def test_other_settings_or_frozen_parameters_release_all_graphs_and_other_shapes_the_oldest() -> None:
    line = Line()
    graphs, capturer = graphs_of(line)

    def captured(rows: int, settings: str) -> None:
        for _ in range(WARM_UP_MICRO_BATCHES + 1):
            assert float(graphs.run(numbers(rows, 1.0), settings).loss) == 5.0 * rows + 1.0

    for rows in range(1, MOST_GRAPHS + 2):
        captured(rows, "one")
    assert graphs.count == MOST_GRAPHS and [tape.is_released for tape in capturer.tapes] == [True, False, False]
    graphs.run(numbers(2, 1.0), "two")
    assert graphs.count == 0 and all(tape.is_released for tape in capturer.tapes)
    captured(1, "two")
    line.shift.requires_grad_(False)
    captured(1, "two")
    outcome = graphs.run(numbers(1, 1.0), "two")
    assert graphs.count == 1 and len(capturer.tapes) == MOST_GRAPHS + 3 and len(outcome.gradients) == 1


@pytest.mark.gpu
def test_graphs_on_a_gpu() -> None:
    """Eager and graphed losses of a network on a GPU, with dropout, and the memory of a second length."""
    both = run_ranks(gpu_courses, 1, backend="nccl")[0]
    assert both[0] == pytest.approx(both[1], rel=1e-6)


def gpu_courses(rank: int) -> list[list[float]]:
    """The losses of both."""
    return [_gpu_losses(is_graphed) for is_graphed in (False, True)]


def _gpu_losses(is_graphed: bool) -> list[float]:
    machine = Machine(device_type="cuda", world_size=1, supports_fp16=True, supports_bf16=True)
    tokenizer = TokenizerFacts(vocab_size=150, eod_id=0, fingerprint="none")
    words = layout_flags(RECIPE, (1, 1, 1), 1, ["--bf16", "--hidden-dropout", "0.1"])
    config = resolve(parse(words), machine, tokenizer)
    mesh = open_mesh(config.parallel)
    engine: Engine = build_engine(config, mesh)
    if is_graphed:
        engine.use_graphs(GraphCapturer(mesh.device))
    losses = []
    for step in range(2 * STEPS):
        result = engine.train_batch(local_batches(RECIPE, config, mesh, step, False), RECIPE.learning_rate)
        losses.append(float(result.loss or 0.0))
    return losses
