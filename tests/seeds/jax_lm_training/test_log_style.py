"""The lines of jax-lm-training, compared character by character."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from examples.jax_lm_training.jax_lm import log_style
from megatron.observe.console import LogPosition
from tests.train.samples import metrics


def test_iteration_lines() -> None:
    position = LogPosition(200, 161_045, epoch=0, seconds_left=17_692.4)
    assert log_style.iteration_lines(metrics(lm_loss=5.8967), position) == [
        "[TRAIN] epoch: 0 step: 200/161045 loss: 5.8967 ppl: 363.83 ETA 4:54:52"
    ]


def test_a_remaining_time_that_is_not_known_is_left_out() -> None:
    (line,) = log_style.iteration_lines(metrics(lm_loss=0.0), LogPosition(1, 2, epoch=1))
    assert line == "[TRAIN] epoch: 1 step: 1/2 loss: 0.0000 ppl: 1.00"


def test_evaluation_lines_name_the_group_unless_it_is_the_validation_data() -> None:
    position = LogPosition(5000, 161_045, epoch=2, seconds_left=1.0)
    assert log_style.evaluation_lines("valid", "iteration 5000", 2.7272, position) == [
        "[EVAL] epoch: 2 step: 5000/161045 loss: 2.7272 ppl: 15.29"
    ]
    assert log_style.evaluation_lines("test", "iteration 5000", 1.0, position)[0].startswith("[EVAL test] epoch: 2 ")


@pytest.mark.parametrize(("loss", "text"), [(math.nan, "loss: nan ppl: nan"), (800.0, "loss: 800.0000 ppl: inf")])
def test_losses_without_a_finite_perplexity_are_shown(loss: float, text: str) -> None:
    (line,) = log_style.evaluation_lines("valid", "", loss, LogPosition(1, 1))
    assert line.endswith(text)


def test_save_lines() -> None:
    assert log_style.SAVE_LINES.before(7, Path("artifacts/")) is None
    assert log_style.SAVE_LINES.after(7, Path("artifacts/")) == "save checkpoint to artifacts/"
