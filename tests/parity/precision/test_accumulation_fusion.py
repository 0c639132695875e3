"""Weight gradients that their products add up train as those that are added afterwards, in every layout."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from megatron.engine.gradients import direct_gradients, main_gradients
from megatron.parallel.joining import open_mesh
from megatron.parallel.tensor import weight_gradients
from megatron.train.start_up import engine_opening
from megatron.train.start_up.engine_opening import open_engine, refusal_of_fusion
from tests.engine.tapes import TapeCapturer
from tests.helpers.campaign_cases import mark_campaign
from tests.helpers.ranks import run_ranks
from tests.kernels.devices.adding_device import AddingDevice, adding_device
from tests.parity.layouts import layout_config, local_batches
from tests.parity.reference import Recipe
from tests.parity.switches import SWITCHES

pytestmark = pytest.mark.slow
RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, learning_rate=2.0e-3, steps=2)
LOSS_RATIO, NORM_RATIO = 4.0e-7, 1.0e-6
BF16_LOSS_RATIO, BF16_NORM_RATIO = 2.0e-4, 3.0e-3  # what is added afterwards is rounded to 8 bits first


class Case(NamedTuple):
    """What is trained, on how many ranks, with which stage of ZeRO and flags.

    Attributes:
        can_add: whether the device adds products of bf16 to float32.
        deepspeed: what a --deepspeed_config file says, as JSON; empty for no file.
    """

    ranks: int
    zero_stage: int
    flags: tuple[str, ...] = ()
    can_add: bool = True
    deepspeed: str = ""

    def size(self, axis: str) -> int:
        """The number of tensor-parallel ranks, or of stages."""
        return int(self.flags[self.flags.index(axis) + 1]) if axis in self.flags else 1


TENSOR, PIPELINE = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
SPLIT, STAGES = (TENSOR, "2"), (PIPELINE, "2")
HALVED = (*STAGES, "--pipeline-schedule", "zbv", "--num-layers", "4")
CASES = {
    "zero 0": Case(1, 0),
    "zero 1": Case(1, 1),
    "zero 2": Case(1, 2),
    "recomputed, dropout": Case(1, 1, ("--checkpoint-activations", "--hidden-dropout", "0.1")),
    "frozen": Case(1, 1, ("--freeze", "decoder.layers.0.*", "embedding.*")),
    "shared layers, experts": Case(1, 1, tuple(SWITCHES["multi-token"])),
    "bf16": Case(1, 1, ("--bf16",)),
    "bf16, others added by hooks": Case(1, 1, ("--bf16",), deepspeed='{"bf16": {"immediate_grad_update": true}}'),
    "bf16, zero 2, llama": Case(1, 2, ("--bf16", *SWITCHES["llama"])),
    "tensor parallel": Case(2, 1, SPLIT),
    "sequence parallel": Case(2, 1, (*SPLIT, "--sequence-parallel")),
    "sequence parallel, bf16": Case(2, 2, ("--bf16", *SPLIT, "--sequence-parallel")),
    "latents": Case(2, 1, (*SPLIT, "--sequence-parallel", *SWITCHES["latents"])),
    "stages": Case(2, 0, STAGES),
    "stages, bf16": Case(2, 2, ("--bf16", *STAGES)),
    "halved backward": Case(2, 1, HALVED),
    "replicas": Case(2, 1),
    "replicas, zero 0": Case(2, 0),
    "tensor parallel stages": Case(4, 1, (*SPLIT, *STAGES)),
    "tensor parallel, halved backward, bf16": Case(4, 1, ("--bf16", *SPLIT, *HALVED, "--sequence-parallel")),
}
KEPT = [name for name, case in CASES.items() if case.ranks < 4]
REFUSED = {
    "no bfloat16 product accumulates into float32 on this device": Case(1, 1, ("--bf16",), can_add=False),
    "gradients are not accumulated in float32": Case(
        1, 1, ("--bf16",), deepspeed='{"data_types": {"grad_accum_dtype": "bf16"}}'
    ),
    "--log-gradient-noise-scale measures the gradients of single micro-batches": Case(
        1, 1, ("--log-gradient-noise-scale",)
    ),
    "a CUDA graph does the same in every micro-batch": Case(1, 1, ("--cuda-graphs", "auto")),
    "blocks are compiled": Case(1, 1, ("--compile", "--compile-backend", "aot_eager")),
    "ZeRO stage 2 averages the gradients of each micro-batch over the ranks": Case(2, 2),
    "DeepSpeed's pipeline engine runs the stages": Case(2, 0, (*STAGES, "--pipeline-engine", "deepspeed")),
    "DeepSpeed accumulates gradients in ZeRO stage 3": Case(
        1, 3
    ),  # the last: it changes torch for the rest of the process
}


def case_of(name: str) -> Case:
    """By its name, or by the reason for which it is refused."""
    return CASES.get(name) or REFUSED[name]


class Course(NamedTuple):
    """Losses and gradient norms of the steps, and how many products were added to a sum."""

    curve: list[tuple[float, float]]
    products: int


Courses = dict[str, list[tuple[Course, Course]]]


def courses(rank: int, cases: dict[str, Case], folder: Path) -> Courses:
    """Each case with one micro-batch and with three (with three alone if products may not add up), with products that
    are to add up and without.
    """
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_gradients, "FEWEST_ADDED_CPU", 1)
        patch.setattr(engine_opening, "refusal_of_graphs", lambda *_: None)
        patch.setattr(engine_opening.device, "GraphCapturer", lambda *_: TapeCapturer())
        return {
            name: [
                (course(name, case, count, folder, True), course(name, case, count, folder, False))
                for count in ((3,) if name in REFUSED else (1, 3))
            ]
            for name, case in cases.items()
        }


def reason_of(name: str, micro_batches: int) -> str | None:
    """Why no products add up; None if they do."""
    if case_of(name).zero_stage == 0 and micro_batches == 1:
        return "the gradients of the only micro-batch are the sums (ZeRO stage 0)"
    return name if name in REFUSED else None


def course(name: str, case: Case, micro_batches: int, folder: Path, is_fused: bool) -> Course:
    """Trains a case."""
    tp, pp = case.size(TENSOR), case.size(PIPELINE)
    dp = case.ranks // (tp * pp)
    recipe = dataclasses.replace(RECIPE, global_batch_size=micro_batches * RECIPE.micro_batch_size * dp)
    flags = [*case.flags, *([] if is_fused else ["--no-gradient-accumulation-fusion"])]
    if case.deepspeed:
        path = folder / "deepspeed.json"
        path.write_text(case.deepspeed)
        flags += ["--deepspeed_config", str(path)]
    config = layout_config(recipe, (tp, pp, dp), case.zero_stage, flags)
    mesh = open_mesh(config.parallel)
    with contextlib.ExitStack() as stack:
        if case.can_add and "--bf16" in flags:
            stack.enter_context(adding_device(AddingDevice()))
        engine, _ = open_engine(config, mesh, None)
        assert refusal_of_fusion(config, engine) == reason_of(name, micro_batches)
        added = [
            stack.enter_context(mock.patch.object(room, "add_product_", wraps=room.add_product_))
            for room in (main_gradients, direct_gradients)
        ]
        curve = []
        for step in range(recipe.steps):
            result = engine.train_batch(local_batches(recipe, config, mesh, step, False), recipe.learning_rate)
            curve.append((float(result.loss or 0), float(result.gradient_norm)))
    return Course(curve, sum(each.call_count for each in added))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[tuple[Course, Course]]]:
    """The courses of a case; all that take as many ranks run in the same processes."""

    @functools.cache
    def on(ranks: int) -> Courses:
        cases = {name: case for name, case in {**CASES, **REFUSED}.items() if case.ranks == ranks}
        return run_ranks(courses, ranks, cases, tmp_path_factory.mktemp("settings"))[0]  # type: ignore[no-any-return]

    return lambda name: on(case_of(name).ranks)[name]


@pytest.mark.full
@pytest.mark.parametrize("name", mark_campaign(CASES, KEPT))
def test_training_is_the_same(name: str, results: Callable[[str], list[tuple[Course, Course]]]) -> None:
    case = CASES[name]
    one, three = results(name)
    for fused, apart in (one, three):
        assert apart.products == 0 and len(fused.curve) == RECIPE.steps
        assert (fused.products == 0) == (reason_of(name, 1 if fused is one[0] else 3) is not None)
        if "--bf16" in case.flags:
            ratios = BF16_LOSS_RATIO, BF16_NORM_RATIO
        else:
            ratios = (LOSS_RATIO, NORM_RATIO) if fused is three[0] else (0.0, 0.0)
        for found, expected in zip(fused.curve, apart.curve, strict=True):
            assert found[0] == pytest.approx(expected[0], rel=ratios[0], abs=0)
            assert found[1] == pytest.approx(expected[1], rel=ratios[1], abs=0)


@pytest.mark.sampled(8)
@pytest.mark.parametrize("reason", REFUSED)
def test_what_stands_in_the_way(reason: str, results: Callable[[str], list[tuple[Course, Course]]]) -> None:
    [(fused, apart)] = results(reason)
    assert fused == apart and fused.products == 0
