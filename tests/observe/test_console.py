"""The printed lines, compared character by character: other people's scripts match them."""

from __future__ import annotations

import math

import pytest

from megatron.observe.console import (
    argument_lines,
    evaluation_lines,
    iteration_line,
    perplexity,
    size_line,
    task_lines,
    trained_line,
)
from megatron.observe.metrics import SourceLoss
from megatron.observe.routing import RoutingFigures
from tests.train.samples import Measured, metrics


def test_iteration_line_has_upstreams_fields_in_upstreams_order() -> None:
    assert iteration_line(metrics()) == (
        " iteration        7/      20 | consumed samples:           56 | consumed tokens:          896 | "
        "elapsed time per iteration (s): 0.50 | learning rate: 1.500E-04 | global batch size:     8 | lm loss: "
        "9.876543E+00 | grad norm: 1.235 | number of skipped iterations:   0 | number of nan iterations:   0 | samples "
        "per second: 16.000 | tokens per second: 256.0 | TFLOPs: 8.00 |"
    )


def test_optional_fields_are_where_upstream_puts_them() -> None:
    line = iteration_line(metrics(loss_scale=65536.0))
    assert " | loss scale: 65536.0 | grad norm: 1.235 | number of skipped" in line


def test_losses_of_sources_follow_the_whole_loss() -> None:
    losses = {"web": SourceLoss(3.0, 2), "books": SourceLoss(math.nan, 4)}
    line = iteration_line(metrics(source_losses=losses, loss_scale=8.0))
    assert "| lm loss: 9.876543E+00 | lm loss web: 3.000000E+00 | lm loss books: NAN | loss scale: 8.0 |" in line


def test_the_loss_per_sample_follows_the_losses() -> None:
    line = iteration_line(metrics(sample_loss=2.5))
    assert "| lm loss: 9.876543E+00 | loss per sample: 2.500000E+00 | grad norm" in line


def test_the_z_loss_follows_the_losses() -> None:
    assert "| lm loss: 9.876543E+00 | z loss: 2.500000E-03 | grad norm" in iteration_line(metrics(z_loss=0.0025))


def test_the_routing_follows_the_losses() -> None:
    line = iteration_line(metrics(routing=RoutingFigures(1.25, 3.5, 0.75, 2.0, 1.5, 3.0)))
    assert (
        "| lm loss: 9.876543E+00 | load balancing loss: 1.2500 | router z loss: 3.5000 | router entropy: 0.7500 | "
        "largest expert load: 2.0000 | mean largest expert load: 1.5000 | idle experts: 3.0000 | grad norm"
    ) in line


def test_an_unknown_gradient_norm_is_omitted() -> None:
    assert "grad norm" not in iteration_line(metrics(gradient_norm=None))


@pytest.mark.parametrize(
    ("loss", "text"), [(math.nan, "NAN"), (math.inf, "INF"), (0.0, "0.000000E+00"), (-1.5, "-1.500000E+00")]
)
def test_the_loss_is_shown_whatever_it_is(loss: float, text: str) -> None:
    assert f"| lm loss: {text} |" in iteration_line(metrics(lm_loss=loss))


def test_evaluation_lines() -> None:
    dashes, text, end = evaluation_lines("valid", "iteration 100", math.log(10.0))
    assert text == "valid loss at iteration 100 | lm loss value: 2.302585E+00 | lm loss PPL: 1.000000E+01 | "
    assert dashes == end == "-" * (len(text) + 1)


def test_task_lines_show_standard_errors_where_there_are_some() -> None:
    dashes, text, end = task_lines(Measured(), "iteration 100")
    assert text == "task cloze at iteration 100 | acc: 0.2500 +- 0.1250 | ppl: 7.5000 | items: 12 | "
    assert dashes == end == "-" * (len(text) + 1)


def test_perplexity_is_capped() -> None:
    assert perplexity(1000.0) == math.exp(20.0)
    assert math.isnan(perplexity(math.nan))


def test_trained_line() -> None:
    text = "trained parameters: 12,704 of 50,240 (25.3 %); the others are frozen (--freeze)"
    assert trained_line(12_704, 50_240) == text


def test_size_line() -> None:
    assert size_line(1, 2, 1_300_000_000, 1_200_000_000) == "[001-002] 1.3000B / 1.2000B"


def test_argument_lines_are_sorted_and_dotted() -> None:
    lines = argument_lines({"seed": 1234, "Bias": True, "adam_eps": 1e-8})
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[1:-1] == [f"  adam_eps {'.' * 40} 1e-08", f"  Bias {'.' * 44} True", f"  seed {'.' * 44} 1234"]
    assert lines[-1] == "-------------------- end of arguments ---------------------"
