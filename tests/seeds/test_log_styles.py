"""The log lines of the four projects, character by character."""

from __future__ import annotations

import math
from pathlib import Path
from types import ModuleType

import pytest

from examples.dsgpt2 import log_style as dsgpt2
from examples.gpt2_all_in import log_style as all_in
from examples.hello_deepspeed import log_style as hello
from examples.jax_lm_training.jax_lm import log_style as jax_lm
from megatron.checkpoint.record import Progress
from megatron.config import ReportConfig
from megatron.observe.console import LogPosition
from megatron.observe.destinations.tensorboard import evaluation_scalars, step_scalars
from tests.train.samples import WORKLOAD, metrics

FIRST = LogPosition(200, 100_000, epoch=1)
LEFT = LogPosition(200, 161_045, epoch=0, seconds_left=17_692.4)
JAX = "epoch: 1 step: 200/100000 loss:"
END = "| epoch: 1 | step: 200/100000"


@pytest.mark.parametrize(
    ("style", "position", "values", "line"),
    [
        (all_in, LogPosition(step=7, train_iterations=20), {}, "Step: 7 | Loss: 9.877"),
        (hello, FIRST, {"lm_loss": 8.01872}, "Loss: 8.0187"),
        (dsgpt2, FIRST, {"lm_loss": 3.9, "learning_rate": 3.5e-4}, f"INFO: [Loss] 3.900000 {END} | lr: 3.500000e-04"),
        (dsgpt2, FIRST, {"sample_loss": 0.048, "learning_rate": 1}, f"INFO: [Loss] 0.048000 {END} | lr: 1.000000e+00"),
        (jax_lm, LEFT, {"lm_loss": 5.8967}, "[TRAIN] epoch: 0 step: 200/161045 loss: 5.8967 ppl: 363.83 ETA 4:54:52"),
        (jax_lm, FIRST, {"lm_loss": 0.0}, f"[TRAIN] {JAX} 0.0000 ppl: 1.00"),
    ],
)
def test_step_lines(style: ModuleType, position: LogPosition, values: dict[str, float], line: str) -> None:
    assert style.iteration_lines(metrics(**values), position) == [line]


@pytest.mark.parametrize(
    ("style", "group", "loss", "line"),
    [
        (hello, "valid", 2.5, "valid loss at iteration 10: 2.5000"),
        (dsgpt2, "valid", 3.9, f"INFO: [Loss (eval)] 3.900000 {END}"),
        (dsgpt2, "test", 3.9, f"INFO: [Loss (eval test)] 3.900000 {END}"),
        (jax_lm, "valid", 2.7272, f"[EVAL] {JAX} 2.7272 ppl: 15.29"),
        (jax_lm, "test", 1.0, f"[EVAL test] {JAX} 1.0000 ppl: 2.72"),
        (jax_lm, "valid", math.nan, f"[EVAL] {JAX} nan ppl: nan"),
        (jax_lm, "valid", 800.0, f"[EVAL] {JAX} 800.0000 ppl: inf"),
    ],
)
def test_evaluation_lines(style: ModuleType, group: str, loss: float, line: str) -> None:
    assert style.evaluation_lines(group, "iteration 10", loss, FIRST) == [line]


@pytest.mark.parametrize(
    ("style", "line"),
    [
        (hello, "Saved model to a/iter_0000007"),
        (dsgpt2, "INFO: [Rank - 0, MODEL SAVE]: a/iter_0000007"),
        (jax_lm, "save checkpoint to a/"),
    ],
)
def test_save_lines(style: ModuleType, line: str) -> None:
    assert style.SAVE_LINES.before(7, Path("a")) is None
    assert style.SAVE_LINES.after(7, Path("a")) == line


def test_only_gpt2_all_in_adds_its_tensorboard_tags() -> None:
    tags = [all_in.LOSS_TAGS]
    report, progress = ReportConfig(), Progress(step=5, consumed_samples=10)
    tagged = step_scalars(metrics(), report, WORKLOAD, all_in.LOSS_TAGS)
    assert tagged["loss_train"] == (9.87654321, 7)
    assert "loss_train" not in step_scalars(metrics(), report, WORKLOAD)
    for group, given, is_tagged in (("valid", tags, True), ("test", tags, False), ("valid", [], False)):
        assert ("loss_valid" in evaluation_scalars(progress, group, 2.5, report, WORKLOAD, *given)) == is_tagged
