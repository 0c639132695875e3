"""Micro-batches as CUDA graphs: when they are, what they compute, and what becomes of their memory.

On a CPU a tape of operations stands for a graph; the last test runs real ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from megatron import device
from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.data.loader import Batch
from megatron.device import CapturedWork, GraphCapturer
from megatron.engine import cuda_graphs
from megatron.engine.cuda_graphs import MOST_GRAPHS, WARM_UP_MICRO_BATCHES, MicroBatchGraphs, graph_refusal
from megatron.engine.micro_batch import DeviceBatch
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine, refusal_of_graphs
from tests.engine.tapes import REFUSED, FailingCapturer, TapeCapturer
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_flags, local_batches
from tests.parity.reference import Recipe

Result = TypeVar("Result")

RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, global_batch_size=4)
STEPS = 5

REFUSALS = {
    "": "",
    "--attention-dropout 0.1": "fused attention seeds a generator for dropout",
    "--attention-dropout 0.1 --no-fused-attention": "",
    "--zero-stage 3": "ZeRO stage 3 fetches the weights of a layer by hooks",
    "--fp16": "",
    "--num-experts 4": "the host reads the number of tokens of each expert",
    "--num-experts 4 --moe-expert-capacity-factor 1.25": "",
    "--kd --load-teacher teacher": "the teacher of a distillation runs between forward and loss",
    "--reset-attention-mask": "attention with documents",
    "--attention-window 4": "only torch's variable-length attention supports windows",
    "--attention-window 4 --kv-channels 8": "only torch's variable-length attention supports windows",
    "--attention-window 4 --kv-channels 8 --bf16": "",
    "--position-embedding-type alibi": "attention with documents",
    "--compile": "graphs of programs of --compile are not supported yet",
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
    "--context-parallel-size 2": "ring attention exchanges keys and values",
    "--context-parallel-size 2 --cp-comm-type a2a": "",
    "--ds-sequence-parallel-size 2": "",
    "--ds-sequence-parallel-size 2 --distributed-backend gloo": "messages of gloo inside the blocks cannot be",
}


def refusal(flags: str, world_size: int, device_type: str = "cuda", *, by_hooks: bool = False) -> str:
    machine = Machine(device_type=device_type, world_size=world_size, supports_fp16=True, supports_bf16=True)
    tokenizer = TokenizerFacts(vocab_size=150, eod_id=0, fingerprint="none")
    words = layout_flags(RECIPE, (1, 1, 1), 1, flags.split())
    return graph_refusal(resolve(parse(words), machine, tokenizer), device_type, by_hooks=by_hooks) or ""


@pytest.mark.parametrize("flags", [*REFUSALS, *LAYOUT_REFUSALS])
def test_reasons_against_graphs(flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_graphs, "has_varlen", lambda: True)
    expected, reason = (REFUSALS | LAYOUT_REFUSALS)[flags], refusal(flags, 1 if flags in REFUSALS else 2)
    assert reason.startswith(expected) and bool(reason) == bool(expected)


def test_torch_the_device_and_hooks_may_be_reasons_against_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert refusal("", 1, "cpu") == "there is no GPU"
    assert "bf16.immediate_grad_update of --deepspeed_config" in refusal("--bf16", 1, by_hooks=True)
    monkeypatch.setattr(cuda_graphs, "has_varlen", lambda: False)
    reason = refusal("--attention-window 4 --kv-channels 8 --bf16", 1)
    assert reason.startswith("only torch's variable-length attention supports windows") and "torch 2.10" in reason


class Course(NamedTuple):
    """Results of a run of the engine."""

    figures: list[tuple[float, float]]  # loss and gradient norm of each step, and an evaluation before the third
    captures: int
    released: int
    refusal: str | None
    kept_nodes: int  # nodes that accumulate gradients and date from the engine's construction


LLAMA = ["--position-embedding-type", "rope", "--normalization", "RMSNorm", "--swiglu", "--disable-bias-linear"]
LLAMA += ["--num-attention-heads", "4", "--num-query-groups", "2"]
CASES: dict[str, tuple[int, list[str]]] = {
    "fp32 zero 0": (0, ["--hidden-dropout", "0.1"]),
    "bf16 zero 1": (1, ["--bf16", "--hidden-dropout", "0.1", "--attention-dropout", "0.1"]),
    "bf16 zero 1, recomputed, frozen": (1, ["--bf16", "--checkpoint-activations", "--freeze", "embedding.*"]),
    "fp32 zero 2, smoothing and z-loss": (2, ["--z-loss-coeff", "0.01", "--label-smoothing", "0.1"]),
    "llama": (1, ["--bf16", *LLAMA]),
    "products in 8 bits": (1, ["--bf16", "--fp8-hybrid", "--fp8-recipe", "rowwise", "--fp8-emulation"]),
    "windows": (0, ["--attention-window", "4", "--position-embedding-type", "rope"]),
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
    return {name: (course(*case), course(*case, TapeCapturer())) for name, case in cases.items()}


def course(zero_stage: int, flags: list[str], capturer: GraphCapturer | None = None, recipe: Recipe = RECIPE) -> Course:
    """Five steps; in the fourth all micro-batches have half the length."""
    ranks = 2 if (zero_stage, flags) in CASES_OF_TWO.values() else 1
    machine = Machine(device.device_type(), ranks, False, supports_bf16=True, supports_fp8=device.supports_fp8())
    tokenizer = TokenizerFacts(vocab_size=recipe.vocab_size, eod_id=0, fingerprint="none")
    config = resolve(parse(layout_flags(recipe, (1, 1, 1), zero_stage, flags)), machine, tokenizer)
    mesh = open_mesh(config.parallel)
    engine = build_engine(config, mesh)
    for parameter in engine.parameters():
        get_gradient_edge(parameter).node.metadata["built"] = True
    if isinstance(capturer, FailingCapturer):
        capturer.agree_on(mesh)
    if capturer is not None:
        engine.passes.use_graphs(capturer)
    figures = []
    for step in range(STEPS):
        batches = local_batches(recipe, config, mesh, step, False)
        if step == 2:
            figures.append(engine.evaluate(batches))
        if step == 3:
            batches = [_half(each) for each in batches]
        result = engine.train_batch(batches, recipe.learning_rate)
        figures.append((float(result.loss or 0.0), result.gradient_norm))
    tapes = capturer.tapes if isinstance(capturer, TapeCapturer) else []
    kept = sum("built" in get_gradient_edge(parameter).node.metadata for parameter in engine.parameters())
    return Course(figures, len(tapes), sum(tape.is_released for tape in tapes), refusal_of_graphs(config, engine), kept)


def _half(batch: Batch) -> Batch:
    half = batch.tokens.shape[1] // 2
    parts = (np.ascontiguousarray(each[:, :half]) for each in (batch.tokens, batch.labels, batch.loss_mask))
    return dataclasses.replace(batch, **dict(zip(("tokens", "labels", "loss_mask"), parts, strict=True)))


@pytest.fixture(scope="module")
def results() -> dict[str, tuple[Course, Course]]:
    return run_ranks(courses, 1, CASES)[0] | run_ranks(courses, 2, CASES_OF_TWO)[1]


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, *CASES_OF_TWO])
def test_graphs_train_as_the_same_steps_without(case: str, results: dict[str, tuple[Course, Course]]) -> None:
    eager, graphed = results[case]
    assert graphed.figures == eager.figures
    assert graphed.captures == 1 and eager.captures == graphed.released == 0
    assert graphed.refusal == "there is no GPU"


@pytest.mark.full
@pytest.mark.parametrize("case", [*CASES, *CASES_OF_TWO])
def test_no_node_of_autograd_outlives_the_stream_it_was_made_on(
    case: str, results: dict[str, tuple[Course, Course]]
) -> None:
    # A node that DeepSpeed kept would run on the stream of the engine's construction, which invalidates a capture.
    assert [course.kept_nodes for course in results[case]] == [0, 0]


def failing_courses(
    rank: int, case: tuple[int, list[str]], failures: list[tuple[int, int]]
) -> list[tuple[Course, str]]:
    """A case with captures of which one fails on the last rank, by number and operation, and what the log says."""
    torch.set_num_threads(1)
    found = []
    with pytest.MonkeyPatch.context() as patch:
        for operation in failures:
            warnings: list[str] = []
            patch.setattr(cuda_graphs.log, "warning", warnings.append)
            fails = rank == (case in CASES_OF_TWO.values())
            capturer = FailingCapturer(0 if fails else None, operation)
            found.append((course(*case, capturer), "".join(warnings)))
    return found


@pytest.mark.parametrize("case", ["bf16 zero 1", "tensor parallelism"])
def test_a_capture_that_fails_leaves_the_run_without_graphs(
    case: str, results: dict[str, tuple[Course, Course]]
) -> None:
    eager, _ = results[case]
    # At the first operation, in the forward pass, in the backward pass, at the end. Tapes send messages, unlike
    # captures, so that a rank may not leave others within the work.
    failures = [0, 30, 300, None] if case in CASES else [None]
    ranks = 1 if case in CASES else 2
    for rank, courses in enumerate(run_ranks(failing_courses, ranks, (CASES | CASES_OF_TWO)[case], failures)):
        for failed, warning in courses:
            assert failed.figures == eager.figures and failed.captures == failed.released
            reason = REFUSED if rank == ranks - 1 else "a capture failed on another rank"
            assert f"could not be captured as a CUDA graph ({reason})" in warning


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([2.0, 3.0]))
        self.shift = nn.Parameter(torch.tensor(1.0))

    def forward(self, batch: DeviceBatch) -> tuple[torch.Tensor, torch.Tensor]:
        loss = (batch.inputs[0].sum(dim=0) * self.slope).sum() + (self.shift.square() if batch.targets else 0)
        return loss, loss.detach().double().reshape(1)


def numbers(rows: int, value: float, *, shifted: bool = True) -> DeviceBatch:
    targets = (torch.ones(1),) if shifted else ()
    return DeviceBatch((torch.full((rows, 2), value),), (), (rows, 2), 0, targets, ())


def graphs_of(line: Line) -> tuple[MicroBatchGraphs, TapeCapturer]:
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
        graphs.set_gradients(outcome, accumulates=False)
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
        graphs.set_gradients(outcome, accumulates=True)
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


class _Measuring(GraphCapturer):
    """Notes by how much each capture makes the memory grow that is reserved on a GPU, in bytes."""

    def __init__(self, *target: torch.device) -> None:
        super().__init__(*target)
        self.growth: list[int] = []

    def capture(self, work: Callable[[], Result], memory: Any) -> tuple[CapturedWork, Result]:
        torch.cuda.empty_cache()  # as a capture does first
        before = torch.cuda.memory_reserved()
        captured = super().capture(work, memory)
        self.growth.append(torch.cuda.memory_reserved() - before)
        return captured


class _MeasuringTapes(_Measuring, TapeCapturer):
    """The same of tapes, which reserve nothing there."""


def measured_courses(rank: int, recipe: Recipe) -> list[tuple[list[float], list[float], list[int]]]:
    """Of each network the losses without and with graphs, and the growth with each of them; micro-batches of a second
    length are captured as well.
    """
    torch.set_num_threads(1)
    courses = []
    eight_bits = ["--bf16", "--fp8-hybrid", *([] if device.supports_fp8() else ["--fp8-emulation"])]
    for flags in (["--bf16", "--hidden-dropout", "0.1"], ["--bf16", *LLAMA], eight_bits):
        capturer = _Measuring(device.current_device()) if device.device_type() == "cuda" else _MeasuringTapes()
        runs = (course(1, flags, each, recipe) for each in (None, capturer))
        eager, graphed = ([loss for loss, _ in run.figures] for run in runs)
        courses.append((eager, graphed, capturer.growth))
    return courses


@pytest.mark.gpu
def test_graphs_on_a_gpu() -> None:
    """The losses are those without, and the graph of a second length uses the memory of the first."""
    recipe = dataclasses.replace(RECIPE, hidden_size=64, sequence_length=8192, micro_batch_size=1, learning_rate=1e-3)
    for eager, graphed, (first, second) in run_ranks(measured_courses, 1, recipe, backend="nccl")[0]:
        assert graphed == pytest.approx(eager, rel=1e-4)  # attention adds up gradients in any order there
        assert first > 3 * second  # half the length
