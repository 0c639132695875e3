"""All runs of some folders: those that appear later, what changed, and the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from tests.trident.dashboard.run_folders import step, write_lines, write_run
from trident.dashboard.board import Board
from trident.dashboard.followed_run import DashboardRun, View
from trident.dashboard.table import MetricsTable


def test_runs_join_and_only_changes_are_reported(tmp_path: Path) -> None:
    first = write_run(tmp_path / "b-first", steps=5)
    board = Board([tmp_path])
    board.search()
    board.poll()
    known: dict[int, int] = {}
    assert [run["name"] for run in board.summaries(known)] == ["b-first"]
    assert board.summaries(known) == [] and len(board.summaries()) == 1
    write_run(tmp_path / "a-second", steps=5)
    board.search()
    board.poll()
    assert {number: run.folder.name for number, run in board.runs.items()} == {1: "b-first", 2: "a-second"}
    assert [run["id"] for run in board.summaries(known)] == [2]
    write_lines(first / "metrics.jsonl", [step(6)])
    changes = board.wait(-1, 0.0)
    board.poll()
    assert board.wait(changes, 0.0) == changes + 1
    assert [run["iteration"] for run in board.summaries(known)] == [6]
    board.poll()
    assert board.wait(changes, 0.0) == changes + 1, "nothing has changed"


def test_its_thread_follows_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trident.dashboard.board._POLL_SECONDS", 0.01)
    folder = write_run(tmp_path / "a", steps=5)
    board = Board([tmp_path])
    board.start()
    ends_at = time.monotonic() + 120
    write_lines(folder / "metrics.jsonl", [step(6)])
    while board.summaries()[0]["iteration"] != 6 and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert board.summaries()[0]["iteration"] == 6
    waiting = threading.Thread(target=board.wait, args=(10**9, 600.0))
    waiting.start()
    board.stop()
    waiting.join(120)
    assert board.is_stopping and not waiting.is_alive()
    board.pause(60.0)


def test_what_a_file_system_refuses_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    board = Board([tmp_path])
    refused = threading.Event()

    def refuse() -> bool:
        refused.set()
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(board, "poll", refuse)
    board.start()
    assert refused.wait(120)
    board.stop()
    assert "the runs cannot be read at the moment" in capsys.readouterr().err


def test_a_run_that_cannot_be_understood_stops_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = [write_run(tmp_path / name, steps=5) for name in ("a-bad", "b-good", "c-bad")]
    (tmp_path / "d-text").mkdir()
    (tmp_path / "d-text/metrics.jsonl").write_text("no record\nnor this\n")
    board = Board([tmp_path])
    board.search()
    board.poll()
    assert [run["state"] for run in board.summaries()] == ["running"] * 3 + ["unreadable"]
    assert board.summaries()[3]["problem"] == "None of the 2 lines read from metrics.jsonl is a record of a run."
    real_add, real_summary = MetricsTable.add, DashboardRun.summary

    def add(table: MetricsTable, records: list[dict[str, object]]) -> None:
        if any("unknown" in record for record in records):
            raise RuntimeError("a defect")
        real_add(table, records)

    def summary(run: DashboardRun) -> dict[str, object]:
        if run.number == 3 and not run.problem:
            raise KeyError("another defect")
        return real_summary(run)

    monkeypatch.setattr(MetricsTable, "add", add)
    monkeypatch.setattr(DashboardRun, "summary", summary)
    write_lines(folders[0] / "metrics.jsonl", [step(6, **{"unknown": 1})])
    write_lines(folders[1] / "metrics.jsonl", [step(6)])
    write_lines(tmp_path / "d-text/metrics.jsonl", [step(1)])
    board.poll()
    found = board.summaries()
    assert [run["state"] for run in found] == ["unreadable", "running", "unreadable", "running"]
    assert found[1]["iteration"] == 6 and "a defect" in found[0]["problem"] and "another defect" in found[2]["problem"]
    board.poll()
    assert [run["points"] for run in board.summaries()] == [0, 6, 0, 1]
    assert capsys.readouterr().err.count("cannot be parsed and is skipped") == 2
    monkeypatch.setattr(DashboardRun, "_load_preview", lambda run: MetricsTable.add(MetricsTable(), [{"unknown": 1}]))
    fresh = Board([folders[1]])
    fresh.search()
    fresh.poll()
    assert fresh.summaries()[0]["state"] == "unreadable" and fresh.runs[1].curves("lm_loss", View("steps", 5)) == []


def test_a_folder_that_cannot_be_read_is_read_again_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board([write_run(tmp_path / "a", steps=5)])
    board.search()
    with monkeypatch.context() as patched:
        patched.setattr(
            DashboardRun, "_read", lambda run: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
        )
        board.poll()
    (found,) = board.summaries()
    assert (found["state"], found["problem"]) == ("unreadable", "The folder cannot be read: Permission denied.")
    board.poll()
    assert (board.summaries()[0]["state"], board.summaries()[0]["points"]) == ("running", 5)


def test_the_thread_outlives_any_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("trident.dashboard.board._POLL_SECONDS", 0.001)
    board = Board([tmp_path])
    calls = iter(range(10**9))
    fifth = threading.Event()

    def fail() -> bool:
        if next(calls) >= 4:
            fifth.set()
        raise RuntimeError("out of order")

    monkeypatch.setattr(board, "poll", fail)
    board.start()
    assert fifth.wait(120)
    board.stop()
    assert capsys.readouterr().err.count("RuntimeError: out of order") == 1, "said once"
