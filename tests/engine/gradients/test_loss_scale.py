"""The loss scale of fp16 against DeepSpeed's, and steps in fp16 that ask the device for nothing."""

from __future__ import annotations

import dataclasses
import math
import random
from types import SimpleNamespace
from typing import Any

import deepspeed
import pytest
import torch
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler

from benchmarks.step_phases import OperationCounter, StepPhases
from megatron.config import Machine, TokenizerFacts, parse, resolve
from megatron.engine.gradients.loss_scale import LossScale, ScaleRule
from megatron.engine.gradients.update_gate import UpdateGate
from megatron.parallel.joining import open_mesh
from megatron.train.start_up.engine_opening import build_engine
from tests.engine.tapes import TapeCapturer
from tests.helpers.ranks import run_ranks
from tests.parity.layouts import layout_flags, local_batches
from tests.parity.reference import Recipe

RECIPE = dataclasses.replace(Recipe(), num_layers=2, hidden_size=16, global_batch_size=4)
CPU = torch.device("cpu")
COUNTERS = ("cur_scale", "cur_hysteresis")


def deepspeed_scaler(rule: ScaleRule, scale: float) -> DynamicLossScaler:
    """DeepSpeed's scaler by the same rule."""
    return DynamicLossScaler(
        init_scale=scale,
        scale_window=rule.window,
        min_scale=rule.least,
        delayed_shift=rule.hysteresis,
        consecutive_hysteresis=rule.refills,
        raise_error_at_min_scale=False,
    )


@pytest.mark.parametrize("window", [1, 3, 7])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
@pytest.mark.parametrize("refills", [False, True])
def test_the_scale_moves_as_deepspeed_s(
    window: int, hysteresis: int, refills: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = SimpleNamespace(is_initialized=lambda: True, get_rank=lambda group=None: 1)
    monkeypatch.setattr(deepspeed.comm.comm, "cdb", alone)
    rule, draw = ScaleRule(window, hysteresis, 4.0, refills), random.Random(window)
    theirs, ours = deepspeed_scaler(rule, 64.0), LossScale(64.0, rule, CPU)
    memory = ours.value.data_ptr()
    for step in range(120):
        overflows = draw.random() < (0.6 if step % 40 < 15 else 0.15)
        theirs.update_scale(overflows)
        ours.update(torch.tensor(overflows))
        counters = ours.counters()
        assert [counters[name] for name in COUNTERS] == [getattr(theirs, name) for name in COUNTERS], step
        if step % 17 == 5:  # a resume from what either of them would save
            saved = counters if step % 2 else {name: getattr(theirs, name) for name in counters}
            ours = LossScale(1.0, rule, CPU)
            memory = ours.value.data_ptr()
            ours.restore(saved)
            assert ours.counters()["cur_iter"] == theirs.cur_iter
    assert ours.value.data_ptr() == memory


def test_a_scale_without_a_rule_stays() -> None:
    scale = LossScale(128.0, None, CPU)
    scale.update(torch.tensor(True))
    assert scale.counters() == {"cur_scale": 128.0}
    scale.restore({"cur_scale": 2.0, "cur_iter": 5})
    assert float(scale.value) == 128.0


# Loss, gradient norm, loss scale, and whether it was skipped, of each step; and what made the host wait in the last.
Course = tuple[list[tuple[float, float, float, bool]], dict[str, int]]


def half_courses(rank: int, zero_stages: list[int]) -> dict[int, tuple[Course, Course, Course]]:
    """Training in fp16: as on a CPU, as on a GPU, and there with graphs."""
    torch.set_num_threads(1)
    found = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(get_accelerator(), "is_fp16_supported", lambda: True)
        for stage in zero_stages:
            found[stage] = (course(stage), course(stage, on_device=True), course(stage, on_device=True, graphs=True))
    return found


def course(stage: int, *, on_device: bool = False, graphs: bool = False) -> Course:
    """Fourteen steps of two micro-batches, from a scale with which gradients overflow."""
    machine = Machine(device_type="cpu", world_size=1, supports_fp16=True, supports_bf16=True)
    words = layout_flags(RECIPE, (1, 1, 1), stage, ["--fp16", "--initial-loss-scale", "1048576", "--hysteresis", "1"])
    tokenizer = TokenizerFacts(vocab_size=RECIPE.vocab_size, eod_id=0, fingerprint="none")
    config = resolve(parse([*words, "--hidden-dropout", "0.1"]), machine, tokenizer)
    mesh = open_mesh(config.parallel)
    engine, phases, results, counter = build_engine(config, mesh), StepPhases(), [], None
    if on_device:
        engine.gate = UpdateGate(mesh, spike_deviations=None, allows_overflow=True, on_device=True)
        engine.view.guard(engine.gate)
    if graphs:
        engine.passes.use_graphs(TapeCapturer())
    engine.on_phase = phases.enter
    for step in range(14):
        phases.start()
        counter = OperationCounter(phases)
        batches = local_batches(RECIPE, config, mesh, step, False)
        with counter.counting():
            results.append(engine.train_batch(batches, RECIPE.learning_rate))
        assert len(engine._count._uncounted) == on_device  # the host has not asked what became of this step
    waits: dict[str, int] = {} if counter is None else counter.waits_of_phase("after_backward")
    figures = [(each.loss or 0.0, each.gradient_norm, each.loss_scale, each.skipped) for each in results]
    assert engine.update_count == sum(not skipped for *_, skipped in figures)
    state = engine.view.loss_scale_state()
    assert state["cur_iter"] == 14 and state["cur_scale"] == figures[-1][2]
    return figures, waits


def test_fp16_trains_without_asking_the_device() -> None:
    (courses,) = run_ranks(half_courses, 1, [1, 2])
    for stage, (usual, on_device, graphed) in courses.items():
        assert repr(usual[0]) == repr(on_device[0]) == repr(graphed[0]), stage
        for _, waits in (usual, on_device, graphed):
            assert sum(waits.values()) == 1 and "tolist at gradients/update_gate.py" in next(iter(waits)), (
                stage,
                waits,
            )
        figures: Any = usual[0]
        skipped = [row for row in figures if row[3]]
        assert 0 < len(skipped) < 12, figures
        assert all(math.isfinite(loss) for loss, *_ in figures), "the logged loss is the unscaled one"
        assert not any(math.isfinite(norm) for _, norm, _, _ in skipped)
        assert all(math.isfinite(norm) for _, norm, _, is_skipped in figures if not is_skipped)
        assert [row[2] for row in skipped] == [1048576.0 / 2 ** (number + 1) for number in range(len(skipped))]
        assert figures[-1][0] < figures[0][0]
