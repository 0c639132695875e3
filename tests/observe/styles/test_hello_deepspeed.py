"""The lines of HelloDeepSpeed, compared character by character."""

from __future__ import annotations

from pathlib import Path

from megatron.observe.line_style import Moment
from megatron.observe.styles import hello_deepspeed
from tests.train.samples import metrics


def test_a_line_is_the_loss() -> None:
    assert hello_deepspeed.iteration_lines(metrics(lm_loss=8.01872), Moment(10, 100)) == ["Loss: 8.0187"]
    assert hello_deepspeed.evaluation_lines("valid", "iteration 10", 2.5, Moment(10, 100)) == [
        "valid loss at iteration 10: 2.5000"
    ]


def test_a_save_names_the_checkpoint() -> None:
    lines = hello_deepspeed.SAVE_LINES
    assert lines.before(5, Path("a")) is None
    assert lines.after(5, Path("a/checkpoints")) == "Saved model to a/checkpoints/iter_0000005"
