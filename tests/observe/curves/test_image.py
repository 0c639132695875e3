"""Curves as a picture."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from megatron.errors import ConfigError, StorageError
from megatron.observe.curves.image import check_plot_path, write_plot
from megatron.observe.curves.reading import Curve

FALLING = Curve("run", tuple((1e6 * step, 10.0 - step) for step in range(10)), run="run")


def test_panels_of_several_runs_are_written(tmp_path: Path) -> None:
    evaluated = Curve("other valid", ((0, 9.0), (5e6, 4.0)), run="other", is_evaluation=True)
    panels = {
        "lm_loss": [FALLING, Curve("other", ((1, 1.0),), run="other"), evaluated],
        "learning_rate": [Curve("run", ((0, 0.0), (9e6, 0.1)), "learning_rate", "run")],
    }
    for name in ("loss.png", "loss.svg"):
        write_plot(panels, tmp_path / name, axis="tokens", smoothing_ratio=0.5, title="two runs", log_scale=True)
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "loss.svg").read_text()
    for words in ("two runs", "other valid", "lm loss", "learning rate", "tokens", "8 M"):
        assert f"<!-- {words} -->" in text
    assert text.count('id="axes_') == 2 and "#1f77b4" in text and "#ff7f0e" in text  # a colour for each run


def test_an_unknown_extension_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"loss.doc has no extension of an image format.*\.png"):
        check_plot_path(tmp_path / "loss.doc")


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"--output .*absent/loss.png cannot be written: No such file"):
        write_plot({"lm_loss": [FALLING]}, tmp_path / "absent" / "loss.png")


def test_a_missing_matplotlib_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r"--output .*loss.png needs .*pip install matplotlib"):
        write_plot({"lm_loss": [FALLING]}, tmp_path / "loss.png")
