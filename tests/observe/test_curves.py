"""Curves as text and as a picture."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path

import pytest

from megatron.checkpoint.record import Progress
from megatron.errors import ConfigError, DataError, StorageError
from megatron.observe.curves import Curve, read_curves, text_plot, write_plot
from megatron.observe.metrics_file import MetricsFile
from tests.train.samples import metrics

FALLING = Curve("run", tuple((step, 10.0 - step) for step in range(10)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run directory with four steps, one of them NaN, and two evaluations."""
    folder = tmp_path / "first run"
    folder.mkdir()
    with contextlib.closing(MetricsFile(folder / "metrics.jsonl")) as file:
        for step, loss in enumerate([4.0, math.nan, 2.0, 1.0], start=1):
            file.step(metrics(iteration=step, lm_loss=loss))
        file.evaluation(Progress(2), "valid", 3.0)
        file.evaluation(Progress(4), "valid", 2.0)
    return folder


def test_curves_of_a_run(run: Path) -> None:
    expected = [
        Curve("first run", ((1, 4.0), (3, 2.0), (4, 1.0))),
        Curve("first run valid", ((2, 3.0), (4, 2.0)), is_evaluation=True),
    ]
    assert read_curves(run, "lm_loss") == read_curves(run / "metrics.jsonl", "lm_loss") == expected
    assert [curve.points[0] for curve in read_curves(run, "gradient_norm")] == [(1, 1.23456)]


def test_a_metric_that_was_not_recorded_is_named(run: Path) -> None:
    with pytest.raises(DataError, match="first run holds no step with a finite loss_scale.*--metric"):
        read_curves(run, "loss_scale")


def test_text_plot_falls_from_the_upper_left_to_the_lower_right() -> None:
    lines = text_plot([FALLING], width=10, height=5, unicode=False)
    assert lines == [
        "run: 10 -> 1 (iterations 0 to 9)",
        "        10 |**",
        "           |  **",
        "           |    **",
        "           |      **",
        "         1 |        **",
        "           +----------",
        "            iteration 0    9",
    ]


def test_braille_has_eight_dots_a_character() -> None:
    diagonal = text_plot([FALLING], width=1, height=1)[1]
    assert diagonal == "        10 |" + chr(0x2800 + 0x01 + 0x02 + 0x20 + 0x80)


@pytest.mark.parametrize("points", [((5, 1.0),), ((1, 2.0), (9, 2.0)), ((1, 1e-300), (2, 1e300))])
def test_any_finite_curve_can_be_drawn(points: tuple[tuple[int, float], ...]) -> None:
    assert len(text_plot([Curve("a", points), Curve("b", points)], width=20, height=3)) == 2 * 6


def test_a_plot_is_written(run: Path, tmp_path: Path) -> None:
    write_plot([*read_curves(run, "lm_loss"), Curve("dot", ((1, 1.0),))], tmp_path / "loss.png", "lm_loss")
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_an_unknown_extension_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss.doc has no extension of an image format.*\.png"):
        write_plot([FALLING], tmp_path / "loss.doc", "lm_loss")


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"--output .*absent/loss.png cannot be written: No such file"):
        write_plot([FALLING], tmp_path / "absent" / "loss.png", "lm_loss")


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--output .*loss.png needs .*pip install matplotlib"):
        write_plot([FALLING], tmp_path / "loss.png", "lm_loss")
