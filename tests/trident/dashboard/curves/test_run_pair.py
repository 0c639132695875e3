"""Two runs side by side."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path
from typing import Any

import pytest

from megatron.errors import DataError
from megatron.observe.metrics_file import MetricsFile
from tests.train.samples import metrics
from trident.dashboard.curves.run_pair import pair_up, read_pair, relative_difference, table, verdict


def steps(first: int, last: int, **changes: Any) -> dict[int, dict[str, Any]]:
    """Records of steps whose loss is 1 / step."""
    fixed = {"gradient_norm": 2.0, "learning_rate": 0.1, "consumed_samples": 8, "consumed_tokens": 128}
    return {step: {**fixed, "lm_loss": 1 / step, **changes} for step in range(first, last + 1)}


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (2.0, 2.0, 0.0),
        (2.0, 1.0, 0.5),
        (-2.0, 2.0, 2.0),
        (math.nan, math.nan, 0.0),
        (math.nan, 1.0, math.inf),
        (math.inf, math.inf, 0.0),
        (0.0, 1e-9, 1.0),
    ],
)
def test_relative_difference(first: float, second: float, expected: float) -> None:
    assert relative_difference(first, second) == relative_difference(second, first) == expected


def test_runs_are_compared_where_they_overlap() -> None:
    pairs = pair_up(steps(1, 7), steps(5, 20), after=4)
    assert [pair.iteration for pair in pairs] == [5, 6, 7]
    agree, sentence = verdict(pairs, 0.0, 0.0)
    assert agree
    assert sentence.startswith("EQUAL: all 3 steps 5 to 7, 3 of them bit for bit; ")


def test_steps_without_a_loss_agree_with_each_other_only() -> None:
    empty = {2: {"lm_loss": None, "gradient_norm": None}}
    first = {step: {**record, **empty.get(step, {})} for step, record in steps(1, 3).items()}
    assert verdict(pair_up(first, first), 0.0, 0.0)[0]
    assert verdict(pair_up(first, steps(1, 3)), 0.0, 0.0)[1].startswith(
        "DIFFERENT: 1 of 3 (steps 1 to 3), first at ste"
    )


def test_a_difference_beyond_the_tolerance_is_found() -> None:
    second = steps(1, 4) | steps(3, 3, lm_loss=1 / 3 + 1e-5)
    pairs = pair_up(steps(1, 4), second)
    assert verdict(pairs, 1e-4, 0.0)[0]
    agree, sentence = verdict(pairs, 1e-6, 0.0)
    assert not agree
    assert sentence.startswith(
        "DIFFERENT: 1 of 4 (steps 1 to 4), first at step 3; largest relative difference of a loss 3.0e-05"
    )


@pytest.mark.parametrize(
    "change", [{"gradient_norm": 2.001}, {"gradient_norm": None}, {"learning_rate": 0.2}, {"consumed_samples": 9}]
)
def test_norm_and_schedule_are_compared_too(change: dict[str, Any]) -> None:
    pairs = pair_up(steps(1, 2), steps(1, 2, **change))
    assert not verdict(pairs, 1.0, 1e-4)[0]


def test_the_table_shows_losses_to_the_last_digit() -> None:
    lines = table(pair_up(steps(3, 3), steps(3, 3, learning_rate=0.2)))
    assert "0.3333333333333333 |     0.3333333333333333 |    0.0e+00" in lines[2]
    assert lines[2].endswith("DIFFERENT")


def test_runs_without_a_common_step_are_refused() -> None:
    with pytest.raises(
        DataError, match="no step after 5 in common: the first has steps 1 to 5, the second steps 1 to 9"
    ):
        pair_up(steps(1, 5), steps(1, 9), after=5)
    with pytest.raises(DataError, match="the second no steps"):
        pair_up(steps(1, 5), {})


@pytest.mark.parametrize(("swap", "which"), [(False, "second"), (True, "first")])
def test_a_step_missing_in_one_run_is_named(swap: bool, which: str) -> None:
    whole, holed = steps(1, 5), steps(1, 5)
    del holed[3]
    with pytest.raises(DataError, match=f"Step 3 is in one run only: the {which} run has steps 1 to 5 without it"):
        pair_up(*((holed, whole) if swap else (whole, holed)))


def test_one_run_is_compared_with_itself(tmp_path: Path) -> None:
    for first, last, loss in ((1, 5, 1.0), (4, 8, 2.0), (5, 6, 3.0)):
        with contextlib.closing(MetricsFile(tmp_path / "metrics.jsonl")) as file:
            for step in range(first, last + 1):
                file.step(metrics(iteration=step, lm_loss=loss))
    before, after = read_pair([tmp_path])
    assert [(step, before[step]["lm_loss"], after[step]["lm_loss"]) for step in before] == [
        (4, 1.0, 2.0),
        (5, 1.0, 3.0),
        (6, 2.0, 3.0),
    ]


def test_one_run_that_was_never_resumed_is_explained(tmp_path: Path) -> None:
    with contextlib.closing(MetricsFile(tmp_path / "metrics.jsonl")) as file:
        for step in range(1, 4):
            file.step(metrics(iteration=step))
    with pytest.raises(DataError, match=r"logged no step twice \(steps 1 to 3\).*resume.*give a second one"):
        read_pair([tmp_path])
