"""Megatron's lines, compared character by character: other people's scripts match them.

A line with every field is in `tests/observe/golden`.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from megatron.objective.metric import StepMetrics
from megatron.observe.console import LogPosition
from megatron.observe.styles import megatron
from tests.train.samples import metrics


def line_of(values: StepMetrics) -> str:
    (line,) = megatron.iteration_lines(values, LogPosition(7, 20))
    return line


def test_iteration_line_has_upstreams_fields_in_upstreams_order() -> None:
    assert line_of(metrics()) == (
        " iteration        7/      20 | consumed samples:           56 | consumed tokens:          896 | "
        "elapsed time per iteration (s): 0.50 | learning rate: 1.500E-04 | global batch size:     8 | lm loss: "
        "9.876543E+00 | grad norm: 1.235 | number of skipped iterations:   0 | number of nan iterations:   0 | samples "
        "per second: 16.000 | tokens per second: 256.0 | TFLOPs: 8.00 |"
    )


def test_a_step_without_a_counted_token_shows_no_loss() -> None:
    text = line_of(metrics(lm_loss=None, gradient_norm=None, empty_iterations=3))
    assert (
        "| lm loss: none | number of skipped iterations:   0 | number of nan iterations:   0 | number of empty " in text
    )
    assert "| number of empty iterations:   3 | samples" in text


def test_what_is_known_of_the_devices_and_the_end_comes_last() -> None:
    values = metrics(teraflops_per_device=123.456, model_flops_utilization_ratio=0.4123)
    (line,) = megatron.iteration_lines(values, LogPosition(7, 20, seconds_left=93_784.6))
    assert line.endswith("| TFLOPs: 123.46 | MFU: 41.2% | ETA: 1 day, 2:03:05 |")


@pytest.mark.parametrize(
    ("teraflops", "text"), [(8.0, "8.00"), (0.1, "0.10"), (0.0999, "0.100"), (0.0123, "0.012"), (2.8e-7, "0.00000028")]
)
def test_a_small_rate_is_not_shown_as_zero(teraflops: float, text: str) -> None:
    assert line_of(metrics(teraflops_per_device=teraflops)).endswith(f"| TFLOPs: {text} |")


def test_a_rate_that_was_not_measured_is_left_out() -> None:
    assert line_of(metrics(teraflops_per_device=0.0)).endswith("| tokens per second: 256.0 |")


def test_an_unknown_gradient_norm_is_omitted() -> None:
    assert "grad norm" not in line_of(metrics(gradient_norm=None))


@pytest.mark.parametrize(
    ("loss", "text"), [(math.nan, "NAN"), (math.inf, "INF"), (0.0, "0.000000E+00"), (-1.5, "-1.500000E+00")]
)
def test_the_loss_is_shown_whatever_it_is(loss: float, text: str) -> None:
    assert f"| lm loss: {text} |" in line_of(metrics(lm_loss=loss))


def test_evaluation_lines() -> None:
    dashes, text, end = megatron.evaluation_lines("valid", "iteration 100", math.log(10.0), LogPosition(100, 200))
    assert text == "valid loss at iteration 100 | lm loss value: 2.302585E+00 | lm loss PPL: 1.000000E+01 | "
    assert dashes == end == "-" * (len(text) + 1)


def test_save_lines() -> None:
    lines = megatron.SAVE_LINES
    assert lines.before(7, Path("run")) == "saving checkpoint at iteration       7 to run"
    assert lines.after(7, Path("run")) == "successfully saved checkpoint at iteration       7 to run"
