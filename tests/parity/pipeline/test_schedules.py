"""Every pipeline schedule trains like one process, with ZeRO, tensor and data parallelism and recomputation."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from megatron.config import Machine
from megatron.config.sections.pipelines import SCHEDULE_CHUNKS, SPLIT_SCHEDULES
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.helpers.campaign_cases import DEFAULT_CASES, mark_campaign
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_config, layout_name, local_batches
from tests.parity.reference import Recipe
from tests.parity.switches import SWITCHES

pytestmark = pytest.mark.slow
# Samples of each step: one to six micro-batches.
BATCH_SIZES = (8, 4, 12, 4, 8)
# Dropout, a tied head, clipping, two groups with different weight decay, and masks that differ from sample to sample.
RECIPE = dataclasses.replace(
    Recipe(), num_layers=5, hidden_size=16, steps=len(BATCH_SIZES), learning_rate=2.0e-3, clip=0.2
)
DROPOUT = ["--hidden-dropout", "0.1", "--attention-dropout", "0.1"]
DEEP = ["--num-layers", "9"]  # a block for each of eight chunks, and one more
LOSS_RATIO, NORM_RATIO = 4.0e-7, 1.0e-6
GPU_RATIO = 1.0e-5  # kernels of a GPU add in another order in each run
EVALUATED = 2  # before this step, a single micro-batch
RECOMPUTED = {"none": [], "attention": ["--recompute-granularity", "selective"], "blocks": ["--checkpoint-activations"]}

Curve = list[tuple[float, float]]
Layout = tuple[int, int, int]


class Case(NamedTuple):
    """A pipeline in a layout."""

    schedule: str
    zero_stage: int
    recomputed: str

    @property
    def flags(self) -> list[str]:
        return ["--pipeline-schedule", self.schedule, *RECOMPUTED[self.recomputed]]


ZERO_STAGES = (0, 1, 2)
LAYOUTS = [(1, 2, 1), (1, 2, 2), (2, 2, 1)]


def covering_cases() -> dict[Layout, list[Case]]:
    """Cases of which any two of schedule, ZeRO stage, recomputation and layout have every pair of values.

    Schedule `i` has a case `j` for each ZeRO stage: its layout is number `i + j` and its recomputation number `2i + j`,
    counted modulo 3. One more case, of eight ranks, has both tensor and data parallelism.
    """
    cases: dict[Layout, list[Case]] = {layout: [] for layout in LAYOUTS}
    for i, schedule in enumerate(SCHEDULE_CHUNKS):
        for j, stage in enumerate(ZERO_STAGES):
            cases[LAYOUTS[(i + j) % 3]].append(Case(schedule, stage, list(RECOMPUTED)[(2 * i + j) % 3]))
    return {**cases, (2, 2, 2): [Case("zbv", 2, "attention")]}


KEPT = covering_cases()
FOUR_STAGES = [Case("interleaved-zb", 2, "attention"), Case("zbv", 1, "blocks")]
ALL = [Case(*case) for case in itertools.product(SCHEDULE_CHUNKS, ZERO_STAGES, RECOMPUTED)]
# Several chunks on one device, which sends itself no messages.
ONE_DEVICE = [Case("interleaved", 0, "none"), Case("zbv", 1, "blocks"), Case("interleaved-zb", 2, "attention")]


def train_cases(rank: int, layout: Layout, cases: list[tuple[int, list[str]]], device_type: str = "cpu") -> list[Curve]:
    """The curves of loss and gradient norm of ZeRO stages and flags; last the loss of an evaluation."""
    curves, mesh = [], None
    tp, pp, dp = layout
    machine = Machine(device_type=device_type, world_size=tp * pp * dp, supports_fp16=False, supports_bf16=True)
    for zero_stage, flags in cases:
        config = layout_config(RECIPE, layout, zero_stage, [*DROPOUT, *flags], machine)
        mesh = mesh or open_mesh(config.parallel)
        engine = build_engine(config, mesh)
        curve = []
        for step, size in enumerate(BATCH_SIZES):
            batches = local_batches(dataclasses.replace(RECIPE, global_batch_size=size), config, mesh, step, True)
            if step == EVALUATED:
                engine.evaluate(batches[:1])
            result = engine.train_batch(batches, RECIPE.learning_rate)
            curve.append((result.loss, result.gradient_norm))
        loss_sum, tokens = engine.evaluate(batches)
        curves.append([*curve, (loss_sum / tokens, 1.0)])
    return curves


def one_device_curves(device_type: str) -> list[Curve]:
    """Those of a whole network, of a deep one, and of the chunks on one device."""
    cases = [(0, []), (0, DEEP), *((case.zero_stage, case.flags) for case in ONE_DEVICE)]
    backend = "gloo" if device_type == "cpu" else "nccl"
    return list(run_ranks(train_cases, 1, (1, 1, 1), cases, device_type, backend=backend)[0])


@pytest.fixture(scope="module")
def alone() -> list[Curve]:
    return one_device_curves("cpu")


def check_curve(case: Case, curve: Curve, expected: Curve, loss_ratio: float, norm_ratio: float) -> None:
    assert min(norm for _, norm in expected) > RECIPE.clip, "clipping must be active"
    for step, (found, one) in enumerate(zip(curve, expected, strict=True)):
        assert found[0] == pytest.approx(one[0], rel=loss_ratio), f"{case}: loss of step {step}"
        assert found[1] == pytest.approx(one[1], rel=norm_ratio), f"{case}: gradient norm of step {step}"


def check(layout: Layout, cases: list[Case], expected: Curve, flags: Sequence[str] = ()) -> None:
    tp, pp, dp = layout
    asked = [(case.zero_stage, [*case.flags, *flags]) for case in cases]
    for curves in run_ranks(train_cases, tp * pp * dp, layout, asked, timeout_seconds=60 + 20 * len(cases)):
        for case, curve in zip(cases, curves, strict=True):
            check_curve(case, curve, expected, LOSS_RATIO, NORM_RATIO)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("layout", KEPT, ids=layout_name)
def test_a_schedule_equals_one_process(layout: Layout, alone: list[Curve]) -> None:
    check(layout, KEPT[layout], alone[0])


def test_four_stages_equal_one_process(alone: list[Curve], request: pytest.FixtureRequest) -> None:
    is_campaign = request.config.getoption("--cases") > DEFAULT_CASES
    check((1, 4, 1), ALL if is_campaign else FOUR_STAGES, alone[1], DEEP)


@pytest.mark.full
@pytest.mark.parametrize("switches", [[], SWITCHES["multi-token, tied"]], ids=["plain", "multi-token, tied"])
def test_buckets_wait_for_gradients_that_are_put_off(switches: list[str], tmp_path: Path) -> None:
    """Of the tied weight, the last chunk has the embedding's gradient after one half and the head's after the other."""
    path = tmp_path / "buckets.json"
    path.write_text('{"zero_optimization": {"reduce_bucket_size": 300}}')
    [expected] = run_ranks(train_cases, 1, (1, 1, 1), [(0, switches)])[0]
    cases = [Case(schedule, 2, "none") for schedule in SPLIT_SCHEDULES]
    check((1, 2, 2), cases, expected, [*switches, "--deepspeed_config", str(path)])


def check_chunks_on_one_device(curves: list[Curve], loss_ratio: float, norm_ratio: float) -> None:
    whole, _, *of_cases = curves
    for case, curve in zip(ONE_DEVICE, of_cases, strict=True):
        check_curve(case, curve, whole, loss_ratio, norm_ratio)


def test_chunks_on_one_device_equal_the_whole_network(alone: list[Curve]) -> None:
    check_chunks_on_one_device(alone, LOSS_RATIO, NORM_RATIO)


@pytest.mark.gpu
def test_chunks_on_a_gpu_equal_the_whole_network() -> None:
    check_chunks_on_one_device(one_device_curves("cuda"), GPU_RATIO, GPU_RATIO)


@pytest.mark.parametrize("layout", mark_campaign([*LAYOUTS, (2, 2, 2)], []), ids=layout_name)
def test_all_combinations_equal_one_process(layout: Layout, alone: list[Curve]) -> None:
    check(layout, ALL, alone[0])
