"""A run that is not there is answered with those that are."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.errors import DataError
from megatron.observe.metrics_file import check_run, newest_runs
from trident.dashboard.curves.reading import read_curves
from trident.dashboard.curves.run_pair import read_pair


def _runs(folder: Path, count: int) -> None:
    for number in range(count):
        run = folder / "runs" / f"gpt-{number}"
        run.mkdir(parents=True)
        (run / "metrics.jsonl").write_text("")
        os.utime(run / "metrics.jsonl", (1000 + number, 1000 + number))
    (folder / "runs" / "nothing logged").mkdir()
    (folder / "runs" / "latest").symlink_to("gpt-0")


def test_the_newest_runs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _runs(tmp_path, 7)
    monkeypatch.chdir(tmp_path)
    assert newest_runs(Path("runs"), 2) == [Path("runs/gpt-6"), Path("runs/gpt-5")]
    message = r"runs/demo does not exist.*The newest under runs/: runs/gpt-6, .*runs/gpt-2\.$"
    with pytest.raises(DataError, match=message):
        check_run("runs/demo")
    with pytest.raises(DataError, match=message):
        read_curves("runs/demo", "lm_loss")
    with pytest.raises(DataError, match=message):
        read_pair(["runs/gpt-1", "runs/demo"])
    check_run("runs/gpt-1")
    check_run("runs/gpt-1/metrics.jsonl")


def test_without_any_runs_none_are_suggested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DataError, match=r"nope does not exist\. Use a run directory or its metrics\.jsonl\.$"):
        check_run("nope")
