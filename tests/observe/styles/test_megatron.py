"""Megatron's lines, compared character by character: other people's scripts match them."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from megatron.observe.console import Moment
from megatron.observe.metrics import SourceLoss, StepMetrics
from megatron.observe.routing import RoutingFigures
from megatron.observe.styles import megatron
from tests.train.samples import metrics


def line_of(values: StepMetrics) -> str:
    (line,) = megatron.iteration_lines(values, Moment(7, 20))
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
    (line,) = megatron.iteration_lines(values, Moment(7, 20, seconds_left=93_784.6))
    assert line.endswith("| TFLOPs: 123.46 | MFU: 41.2% | ETA: 1 day, 2:03:05 |")


@pytest.mark.parametrize(
    ("teraflops", "text"), [(8.0, "8.00"), (0.1, "0.10"), (0.0999, "0.100"), (0.0123, "0.012"), (2.8e-7, "0.00000028")]
)
def test_a_small_rate_is_not_shown_as_zero(teraflops: float, text: str) -> None:
    assert line_of(metrics(teraflops_per_device=teraflops)).endswith(f"| TFLOPs: {text} |")


def test_a_rate_that_was_not_measured_is_left_out() -> None:
    assert line_of(metrics(teraflops_per_device=0.0)).endswith("| tokens per second: 256.0 |")


def test_optional_fields_are_where_upstream_puts_them() -> None:
    line = line_of(metrics(loss_scale=65536.0))
    assert " | loss scale: 65536.0 | grad norm: 1.235 | number of skipped" in line


def test_losses_of_sources_follow_the_whole_loss() -> None:
    losses = {"web": SourceLoss(3.0, 2), "books": SourceLoss(math.nan, 4)}
    line = line_of(metrics(source_losses=losses, loss_scale=8.0))
    assert "| lm loss: 9.876543E+00 | lm loss web: 3.000000E+00 | lm loss books: NAN | loss scale: 8.0 |" in line


def test_the_loss_per_sample_follows_the_losses() -> None:
    line = line_of(metrics(sample_loss=2.5))
    assert "| lm loss: 9.876543E+00 | loss per sample: 2.500000E+00 | grad norm" in line


def test_the_sentence_order_loss_follows_the_loss_of_masked_tokens() -> None:
    assert "| lm loss: 9.876543E+00 | sop loss: 6.931000E-01 | grad norm" in line_of(metrics(order_loss=0.6931))


def test_the_losses_of_depths_have_megatron_lms_names() -> None:
    line = line_of(metrics(mtp_losses={"mtp_1": 5.5, "mtp_2": 6.25}))
    assert "| lm loss: 9.876543E+00 | mtp_1 loss: 5.500000E+00 | mtp_2 loss: 6.250000E+00 | grad norm" in line


def test_the_z_loss_follows_the_losses() -> None:
    assert "| lm loss: 9.876543E+00 | z loss: 2.500000E-03 | grad norm" in line_of(metrics(z_loss=0.0025))


def test_the_norm_of_the_weights_follows_that_of_the_gradient() -> None:
    line = line_of(metrics(weight_norm=12.3456))
    assert re.search(r"\| grad norm: [\d.]+ \| params norm: 12\.346 \| number of skipped", line)


def test_zeros_are_where_upstream_puts_them_and_the_noise_scale_is_new() -> None:
    line = line_of(metrics(gradient_zeros=1234, weight_norm=12.3456, noise_scale=98.76))
    assert (
        "| grad norm: 1.235 | num zeros: 1234.0 | params norm: 12.346 | noise scale: 98.8 | number of skipped" in line
    )


def test_the_routing_follows_the_losses() -> None:
    line = line_of(metrics(routing=RoutingFigures(1.25, 3.5, 0.75, 2.0, 1.5, 3.0)))
    assert (
        "| lm loss: 9.876543E+00 | load balancing loss: 1.2500 | router z loss: 3.5000 | router entropy: 0.7500 | "
        "largest expert load: 2.0000 | mean largest expert load: 1.5000 | idle experts: 3.0000 | grad norm"
    ) in line


def test_an_unknown_gradient_norm_is_omitted() -> None:
    assert "grad norm" not in line_of(metrics(gradient_norm=None))


@pytest.mark.parametrize(
    ("loss", "text"), [(math.nan, "NAN"), (math.inf, "INF"), (0.0, "0.000000E+00"), (-1.5, "-1.500000E+00")]
)
def test_the_loss_is_shown_whatever_it_is(loss: float, text: str) -> None:
    assert f"| lm loss: {text} |" in line_of(metrics(lm_loss=loss))


def test_evaluation_lines() -> None:
    dashes, text, end = megatron.evaluation_lines("valid", "iteration 100", math.log(10.0), Moment(100, 200))
    assert text == "valid loss at iteration 100 | lm loss value: 2.302585E+00 | lm loss PPL: 1.000000E+01 | "
    assert dashes == end == "-" * (len(text) + 1)


def test_save_lines() -> None:
    lines = megatron.SAVE_LINES
    assert lines.before(7, Path("run")) == "saving checkpoint at iteration       7 to run"
    assert lines.after(7, Path("run")) == "successfully saved checkpoint at iteration       7 to run"
