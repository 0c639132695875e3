"""The printed lines, compared character by character: other people's scripts match them."""

from __future__ import annotations

import math

from megatron.observe.console import (
    argument_lines,
    perplexity,
    size_line,
    task_lines,
)
from tests.train.samples import Measured


def test_task_lines_show_standard_errors_where_there_are_some() -> None:
    dashes, text, end = task_lines(Measured(), "iteration 100")
    assert text == "task cloze at iteration 100 | acc: 0.2500 +- 0.1250 | ppl: 7.5000 | items: 12 | "
    assert dashes == end == "-" * (len(text) + 1)


def test_perplexity_is_capped() -> None:
    assert perplexity(1000.0) == math.exp(20.0)
    assert math.isnan(perplexity(math.nan))


def test_size_line() -> None:
    assert size_line(1, 2, 1_300_000_000, 1_200_000_000) == "[001-002] 1.3000B / 1.2000B"


def test_argument_lines_are_sorted_and_dotted() -> None:
    lines = argument_lines({"seed": 1234, "Bias": True, "adam_eps": 1e-8})
    assert lines[0] == "------------------------ arguments ------------------------"
    assert lines[1:-1] == [f"  adam_eps {'.' * 40} 1e-08", f"  Bias {'.' * 44} True", f"  seed {'.' * 44} 1234"]
    assert lines[-1] == "-------------------- end of arguments ---------------------"
