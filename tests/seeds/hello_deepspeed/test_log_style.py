"""The lines of HelloDeepSpeed, compared character by character."""

from __future__ import annotations

from pathlib import Path

from examples.hello_deepspeed import log_style
from megatron.observe.console import LogPosition
from tests.train.samples import metrics


def test_a_line_is_the_loss() -> None:
    assert log_style.iteration_lines(metrics(lm_loss=8.01872), LogPosition(10, 100)) == ["Loss: 8.0187"]
    assert log_style.evaluation_lines("valid", "iteration 10", 2.5, LogPosition(10, 100)) == [
        "valid loss at iteration 10: 2.5000"
    ]


def test_a_save_names_the_checkpoint() -> None:
    lines = log_style.SAVE_LINES
    assert lines.before(5, Path("a")) is None
    assert lines.after(5, Path("a/checkpoints")) == "Saved model to a/checkpoints/iter_0000005"
