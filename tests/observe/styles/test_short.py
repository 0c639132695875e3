"""The short lines, compared character by character."""

from __future__ import annotations

from pathlib import Path

from megatron.observe.console import LogPosition
from megatron.observe.styles import short
from tests.train.samples import metrics

POSITION = LogPosition(120, 100_000, seconds_left=3723.0)
USUAL = {
    **{"iteration": 120, "train_iterations": 100_000, "lm_loss": 5.8967, "gradient_norm": 0.5},
    **{"learning_rate": 3e-4, "tokens_per_second": 12_345.6, "skipped_iterations": 0},
}


def test_lines_of_steps_fit_a_terminal_and_show_what_there_is() -> None:
    text = "step 120/100000 | loss 5.8967 | gradient 0.500 | rate 3.00e-04 | 12.3K tokens/s | 1:02:03 left"
    assert short.iteration_lines(metrics(**USUAL), POSITION) == [text]
    (full,) = short.iteration_lines(metrics(**{**USUAL, "distillation_loss": 1.25, "skipped_iterations": 3}), POSITION)
    assert "| kd 1.2500 |" in full and "| 3 skipped |" in full and len(full) <= 120
    (bare,) = short.iteration_lines(metrics(**{**USUAL, "gradient_norm": None}), LogPosition(120, 100_000))
    assert bare == "step 120/100000 | loss 5.8967 | rate 3.00e-04 | 12.3K tokens/s"


def test_lines_of_evaluations_and_saves() -> None:
    assert short.evaluation_lines("valid", "iteration 120", 2.0, POSITION) == [
        "step 120/100000 | valid loss 2.0000 | perplexity 7.39"
    ]
    assert short.SAVE_LINES.before(120, Path("c")) is None
    assert short.SAVE_LINES.after(120, Path("c")) == "saved c/iter_0000120"
