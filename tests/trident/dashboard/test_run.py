"""A run as the dashboard sees it while it trains, is killed and resumed, ends, and is deleted."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import numpy as np
import pytest

from tests.trident.dashboard.run_folders import step, write_lines, write_run
from trident.dashboard.discovery import RunFolder
from trident.dashboard.followed_run import DashboardRun, View

VIEW = View("steps", 100)


def opened(folder: Path) -> DashboardRun:
    run = DashboardRun(1, RunFolder(folder, folder.name))
    while run.poll():
        pass
    return run


def age(path: Path, seconds: float) -> None:
    os.utime(path, (time.time() - seconds, time.time() - seconds))


def test_a_run_from_its_first_step_to_its_end(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "first", steps=200, saving={"save": "/checkpoints/first"})
    run = opened(folder)
    summary = run.summary()
    assert (summary["name"], summary["state"], summary["iteration"], summary["points"]) == (
        "first",
        "running",
        200,
        200,
    )
    assert summary["train_iterations"] == 1000 and summary["eta_seconds"] == pytest.approx(400.0)
    assert summary["layout"] == {"pp": 2, "dp": 1, "tp": 2} and run.save_folder() == Path("/checkpoints/first")
    (training, curve), (group, evaluations) = run.curves("lm_loss", VIEW)
    assert training == "" and len(curve.x) == 100 and group == "valid" and evaluations.x.tolist() == [100, 200]
    version = run.version
    assert not run.poll() and run.version == version, "nothing has changed"
    write_lines(folder / "metrics.jsonl", [step(201, lm_loss=1.25)], end="\n" + json.dumps(step(202))[:40])
    run.poll()
    assert run.version > version and run.summary()["loss"] == 1.25
    assert run.curves("lm_loss", VIEW)[0][1].extent == (1.0, 201.0)
    write_lines(folder / "events.jsonl", [{"kind": "finished", "at": time.time(), "iteration": 201, "text": ""}])
    run.poll()
    assert run.state() == run.summary()["state"] == "finished" and run.summary()["eta_seconds"] is None
    assert [event["kind"] for event in run.details()["events"]] == ["start", "finished"]
    shutil.rmtree(folder)
    run.poll()
    assert run.summary()["state"] == "gone" and run.summary()["points"] == 201, "what was read stays"


def test_what_is_known_of_a_run_that_says_nothing(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=10)
    metrics, beats = folder / "metrics.jsonl", folder / "heartbeats.json"
    run = opened(folder)
    age(metrics, 1000)
    assert run.state() == "idle"
    write_lines(metrics, [step(1000)])
    age(metrics, 1000)
    run.poll()
    assert run.state() == "finished"
    beats.write_text('{"axes": [["tp", 2]], "ranks": [{"rank": 0}]}')
    assert run.state() == "running" and run.details()["heartbeats"]["ranks"] == [{"rank": 0}]
    age(beats, 100)
    assert run.state() == "lost"
    write_lines(folder / "events.jsonl", [{"kind": "failed", "at": 1.8e9, "text": "no memory"}])
    run.poll()
    assert run.state() == "failed"
    write_lines(metrics, [{"kind": "start", "step": 5, "at": 1.9e9}, step(6)])
    run.poll()
    assert run.state() == "lost" and run.summary()["repeated_steps"] == 6 and run.summary()["starts"] == 2


def test_a_long_file_shows_a_first_look_until_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trident.dashboard.followed_run._LONG_FILE_BYTES", 1000)
    run = DashboardRun(1, RunFolder(write_run(tmp_path / "a", steps=6000), "a"))
    run.load_preview()
    first = run.summary()
    assert first["iteration"] == 6000 and 200 < first["points"] < 300 and first["reading"] == 0.0
    (_, curve), *_ = run.curves("lm_loss", View("hours", 5000))
    assert curve.extent[1] == pytest.approx(6000 * 0.5 / 3600)
    assert run.poll(), "there is more to read"
    assert run.summary()["points"] < 300 and 0 < run.summary()["reading"] < 1
    while run.poll():
        pass
    assert run.summary()["points"] == 6000 and run.summary()["reading"] == 1.0
    (_, curve), *_ = run.curves("lm_loss", View("hours", 5000))
    assert curve.extent[1] == pytest.approx(6000 * 0.5 / 3600)
    run.load_preview()
    assert run.summary()["points"] == 6000


def test_views_are_kept_until_the_run_changes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=500)
    run = opened(folder)
    smooth = View("tokens", 50, weight=0.9, between=(1000.0, 9000.0))
    first = run.curves("lm_loss", smooth)
    assert run.curves("lm_loss", smooth) is first
    assert first[0][1].x[0] <= 1000 and np.isfinite(first[0][1].line).all()
    for number in range(40):
        run.curves("lm_loss", View("steps", 10 + number))
    assert run.curves("lm_loss", smooth) is not first
    write_lines(folder / "metrics.jsonl", [step(501)])
    run.poll()
    assert run.curves("lm_loss", VIEW)[0][1].extent[1] == 501 and run.curves("no such metric", VIEW) == []


def test_samples_of_repeated_steps_and_a_log_without_secrets(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", steps=3)
    sample = {"samples": [{"prompt": "Once", "text": " upon"}]}
    write_lines(folder / "samples.jsonl", [{"iteration": at, "at": 1.0, **sample} for at in (10, 20, 30, 20)])
    (folder / "log.txt").write_text("reads mongodb://me:hunter2@host/db\n\x1b[31mred\nend\n")
    run = opened(folder)
    assert [one["iteration"] for one in run.details()["samples"]] == [10, 20] and run.summary()["samples"] == 2
    text, size = run.log_tail()
    assert "hunter2" not in text and "mongodb://me:***@host/db" in text and "\x1b" not in text and size > 30
    (folder / "config.json").unlink()
    run.poll()
    assert run.configuration() == {} and run.save_folder() is None and run.summary()["layout"] == {}
