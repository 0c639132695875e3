"""The lines of dsGPT2, compared character by character."""

from __future__ import annotations

from pathlib import Path

from examples.dsgpt2 import log_style
from megatron.observe.console import LogPosition
from tests.train.samples import metrics

POSITION = LogPosition(200, 100_000, epoch=1)


def test_the_loss_that_is_minimized_is_shown() -> None:
    end = " | epoch: 1 | step: 200/100000 | lr: 3.500000e-04"
    values = metrics(lm_loss=3.9, learning_rate=3.5e-4)
    assert log_style.iteration_lines(values, POSITION) == [f"INFO: [Loss] 3.900000{end}"]
    values = metrics(lm_loss=3.9, sample_loss=0.048, learning_rate=3.5e-4)
    assert log_style.iteration_lines(values, POSITION) == [f"INFO: [Loss] 0.048000{end}"]


def test_evaluation_lines_name_the_group_unless_it_is_the_validation_data() -> None:
    place = "epoch: 1 | step: 200/100000"
    assert log_style.evaluation_lines("valid", "", 3.9, POSITION) == [f"INFO: [Loss (eval)] 3.900000 | {place}"]
    assert log_style.evaluation_lines("test", "", 3.9, POSITION) == [f"INFO: [Loss (eval test)] 3.900000 | {place}"]


def test_save_lines() -> None:
    assert log_style.SAVE_LINES.before(7, Path("checkpoints/test0")) is None
    said = log_style.SAVE_LINES.after(7, Path("checkpoints/test0"))
    assert said == "INFO: [Rank - 0, MODEL SAVE]: checkpoints/test0/iter_0000007"
