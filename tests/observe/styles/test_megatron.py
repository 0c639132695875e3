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


def test_evaluation_lines() -> None:
    dashes, text, end = megatron.evaluation_lines("valid", "iteration 100", math.log(10.0), LogPosition(100, 200))
    assert text == "valid loss at iteration 100 | lm loss value: 2.302585E+00 | lm loss PPL: 1.000000E+01 | "
    assert dashes == end == "-" * (len(text) + 1)


def test_save_lines() -> None:
    lines = megatron.SAVE_LINES
    assert lines.before(7, Path("run")) == "saving checkpoint at iteration       7 to run"
    assert lines.after(7, Path("run")) == "successfully saved checkpoint at iteration       7 to run"


@pytest.mark.parametrize(
    ("field", "value", "text"),
    [
        ("lm_loss", math.nan, "| lm loss: NAN |"), ("lm_loss", 0.0, "| lm loss: 0.000000E+00 |"),
        ("lm_loss", -1.5, "| lm loss: -1.500000E+00 |"), ("teraflops_per_device", 0.0999, "| TFLOPs: 0.100 |"),
        ("teraflops_per_device", 2.8e-7, "| TFLOPs: 0.00000028 |"), ("teraflops_per_device", 0.0, " second: 256.0 |"),
    ],
)  # fmt: skip
def test_values_of_every_size(field: str, value: float, text: str) -> None:
    line = line_of(metrics(**{field: value}))
    assert line.endswith(text) if field.startswith("tera") else text in line
