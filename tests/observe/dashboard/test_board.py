"""All runs of some folders: those that appear later, what changed, and the end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megatron.observe.dashboard.board import Board
from tests.observe.dashboard.run_folders import step, write_lines, write_run


def test_runs_join_and_only_what_changed_is_told(tmp_path: Path) -> None:
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
    assert {number: run.place.name for number, run in board.runs.items()} == {1: "b-first", 2: "a-second"}
    assert [run["id"] for run in board.summaries(known)] == [2]
    write_lines(first / "metrics.jsonl", [step(6)])
    changes = board.wait(-1, 0.0)
    board.poll()
    assert board.wait(changes, 0.0) == changes + 1
    assert [run["iteration"] for run in board.summaries(known)] == [6]
    board.poll()
    assert board.wait(changes, 0.0) == changes + 1, "nothing has changed"


def test_its_thread_follows_until_it_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron.observe.dashboard.board._POLL_SECONDS", 0.01)
    folder = write_run(tmp_path / "a", steps=5)
    board = Board([tmp_path])
    board.start()
    ends_at = time.monotonic() + 30
    write_lines(folder / "metrics.jsonl", [step(6)])
    while board.summaries()[0]["iteration"] != 6 and time.monotonic() < ends_at:
        time.sleep(0.01)
    assert board.summaries()[0]["iteration"] == 6
    waiting = threading.Thread(target=board.wait, args=(10**9, 60.0))
    waiting.start()
    board.stop()
    waiting.join(10)
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
    assert refused.wait(30)
    board.stop()
    assert "the runs could not be read just now" in capsys.readouterr().err
