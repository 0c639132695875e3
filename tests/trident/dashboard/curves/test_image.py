"""Curves as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, StorageError
from trident.dashboard.curves.image import check_plot_path, draw_plot, write_plot
from trident.dashboard.curves.reading import Curve

FALLING = Curve("run", tuple((1e6 * step, 10.0 - step) for step in range(10)), run="run")


def test_panels_of_several_runs_are_written(tmp_path: Path) -> None:
    evaluated = Curve("other valid", ((0, 9.0), (5e6, 4.0)), run="other", group="valid")
    panels = {
        "lm_loss": [FALLING, Curve("other", ((1, 1.0),), run="other"), evaluated],
        "learning_rate": [Curve("run", ((0, 0.0), (9e6, 0.1)), "learning_rate", "run")],
    }
    for name in ("loss.png", "loss.svg"):
        path = tmp_path / name
        figure = draw_plot(panels, path, axis="tokens", smoothing_ratio=0.5, title="two runs", log_scale=True)
        write_plot(figure, path)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "loss.svg").read_text()
    for words in ("two runs", "other valid", "lm loss", "learning rate", "tokens", "8 M"):
        assert f"<!-- {words} -->" in text
    assert text.count('id="axes_') == 2 and "#1f77b4" in text and "#ff7f0e" in text  # a colour for each run


def test_a_curve_that_another_hides_is_a_wide_band_below_it(tmp_path: Path) -> None:
    killed = Curve("killed", tuple((step, 5.0 - step / 10) for step in range(20)), run="killed")
    resumed = Curve("resumed", tuple((step, 5.0 - step / 10 + 1e-6) for step in range(10, 30)), run="resumed")
    assert resumed.covers(killed) and not resumed.covers(FALLING)
    groups = [Curve(name, ((29, 2.0),), run="resumed", group=name) for name in ("validation", "test")]
    marks = [(10, "saved"), (19, "killed")]
    figure = draw_plot({"lm_loss": [killed, resumed, *groups]}, tmp_path / "a.png", marks=marks)
    (axes,) = figure.axes
    below, above, validation, test = axes.lines[:4]
    assert below.get_linewidth() > 3 * above.get_linewidth() and below.get_zorder() < above.get_zorder()
    assert validation.get_marker() != test.get_marker() and validation.get_linestyle() != test.get_linestyle()
    assert [(text.get_text(), text.get_position()[0]) for text in axes.texts] == [(text, x) for x, text in marks]
    assert [line.get_xdata()[0] for line in axes.lines[4:]] == [10, 19]


def test_an_unknown_extension_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss.doc has no known image extension.*\.png"):
        check_plot_path(tmp_path / "loss.doc")


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"--output .*absent/loss.png cannot be written: No such file"):
        path = tmp_path / "absent" / "loss.png"
        write_plot(draw_plot({"lm_loss": [FALLING]}, path), path)


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--output .*loss.png requires .*pip install matplotlib"):
        draw_plot({"lm_loss": [FALLING]}, tmp_path / "loss.png")
