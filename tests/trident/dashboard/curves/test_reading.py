"""Curves read from the records of runs."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest

from megatron.checkpoint.record import Progress
from megatron.errors import DataError
from megatron.observe.metrics_file import MetricsFile
from tests.train.samples import metrics
from trident.dashboard.curves.reading import AXES, Curve, position_text, read_curves


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with four steps of half an hour, one of them NaN, and two evaluations."""
    folder = tmp_path / "first run"
    folder.mkdir()
    with contextlib.closing(MetricsFile(folder / "metrics.jsonl")) as file:
        for step, loss in enumerate([4.0, math.nan, 2.0, 1.0], start=1):
            counts = {"consumed_samples": 8 * step, "consumed_tokens": 128 * step}
            more = {"gigaflops_without_embeddings": 5.0 * step, "seconds_per_iteration": 1800.0}
            file.step(metrics(iteration=step, lm_loss=loss, **counts, **more))
        file.evaluation(Progress(2, 16, 256), "valid", 3.0)
        file.evaluation(Progress(4, 32, 512), "valid", 2.0)
    return folder


def test_curves_of_a_run(run: Path) -> None:
    expected = [
        Curve("first run", ((1, 4.0), (3, 2.0), (4, 1.0)), "lm_loss", "first run"),
        Curve("first run, validation", ((2, 3.0), (4, 2.0)), "lm_loss", "first run", group="valid"),
    ]
    assert read_curves(run, "lm_loss") == read_curves(run / "metrics.jsonl", "lm_loss") == expected
    assert [curve.points[0] for curve in read_curves(run, "gradient_norm")] == [(1, 1.23456)]
    assert [curve.name for curve in read_curves(run, "lm_loss", name="mine")] == ["mine", "mine, validation"]


def test_every_axis(run: Path) -> None:
    places = {axis: [[x for x, _ in curve.points] for curve in read_curves(run, "lm_loss", axis)] for axis in AXES}
    assert places == {
        "steps": [[1, 3, 4], [2, 4]],
        "samples": [[8, 24, 32], [16, 32]],
        "tokens": [[128, 384, 512], [256, 512]],
        "hours": [[0.5, 1.5, 2.0], [1.0, 2.0]],
        "flops": [[5e9, 15e9, 20e9], [10e9, 20e9]],
    }
    assert [position_text(12_000, axis) for axis in AXES] == ["12000", "12.0K", "12.0K", "1.2e+04", "12.0K"]


def test_a_moving_average_has_no_bias_and_leaves_what_is_set_alone() -> None:
    curve = Curve("a", ((1, 4.0), (2, 1.0)))
    assert curve.smoothed(0.5).points == ((1, 4.0), (2, (0.25 * 4.0 + 0.5 * 1.0) / 0.75))
    assert curve.smoothed(0.0).points == curve.points
    rate = Curve("a", ((1, 4.0), (2, 1.0)), "learning_rate")
    assert rate.smoothed(0.5) is rate


def test_a_metric_that_was_not_recorded_is_named(run: Path) -> None:
    with pytest.raises(DataError, match="first run has no step with a finite loss_scale.*--metric"):
        read_curves(run, "loss_scale")
