"""Events, samples and heartbeats: what is in the files, how a run ends, and disks that refuse."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron import process_exit
from megatron.errors import DataError
from megatron.observe.activity import Activity
from tests.helpers.tiny_run import train, write_tiny_corpus


def lines(path: Path) -> list[dict[str, Any]]:
    return [{**json.loads(line), "at": None} for line in path.read_text().splitlines()]


def opened(folder: Path) -> Activity:
    activity = Activity(beat_seconds=0.01)
    activity.open(folder, [("pp", 2), ("tp", 1)], lambda: [{"rank": 0}, {"rank": 1}])
    return activity


def test_a_run_that_finishes(tmp_path: Path) -> None:
    activity = opened(tmp_path)
    with activity.until_end(lambda: 8):
        activity.saved(tmp_path / "checkpoints/iter_0000004")
        activity.failed_save(6, "cannot write mongodb://me:hunter2@host/db ")
        activity.sampled(4, ["Once", "Çok"], [" upon\n", " eski"])
    saved, failed, end = lines(tmp_path / "events.jsonl")
    assert saved == {"at": None, "kind": "save", "iteration": 4, "text": "iter_0000004"}
    assert (failed["kind"], failed["iteration"]) == ("failed_save", 6)
    assert failed["text"].startswith("cannot write") and "hunter2" not in failed["text"]
    assert end == {"at": None, "kind": "finished", "iteration": 8, "text": "", "code": 0}
    (sample,) = lines(tmp_path / "samples.jsonl")
    assert sample["samples"] == [{"prompt": "Once", "text": " upon\n"}, {"prompt": "Çok", "text": " eski"}]
    beats = json.loads((tmp_path / "heartbeats.json").read_text())
    assert beats["axes"] == [["pp", 2], ["tp", 1]] and beats["ranks"] == [{"rank": 0}, {"rank": 1}]
    activity.close()
    assert {path.name for path in tmp_path.iterdir()} == {"events.jsonl", "samples.jsonl", "heartbeats.json"}


@pytest.mark.parametrize("world_size", [1, 2])
def test_the_last_heartbeats_show_the_last_step_of_every_rank(tmp_path: Path, world_size: int) -> None:
    flags = write_tiny_corpus(tmp_path).flags(folder=tmp_path, zero_stage=0, hang_timeout_seconds=100)
    assert train(flags, world_size) == (0, "")
    beats = json.loads((tmp_path / "run" / "heartbeats.json").read_text())
    assert [(rank["rank"], rank["step"]) for rank in beats["ranks"]] == [(rank, 8) for rank in range(world_size)]


def test_all_ranks_are_asked_before_the_last_heartbeat(tmp_path: Path) -> None:
    activity, step = Activity(beat_seconds=100.0), [0]
    activity.open(tmp_path, [], lambda: [{"rank": 0, "step": step[0]}], lambda: step.append(step.pop() + 8))
    with activity.until_end(lambda: 8):
        pass
    assert json.loads((tmp_path / "heartbeats.json").read_text())["ranks"] == [{"rank": 0, "step": 8}]


def test_runs_that_stop_or_fail(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").write_text('{"kind": "sa')  # torn by a crash
    activity = opened(tmp_path)
    with activity.until_end(lambda: 5):
        activity.stopping("exiting: the kill switch is on")
    activity = opened(tmp_path)
    with pytest.raises(DataError, match="no such file"), activity.until_end(lambda: 6):
        raise DataError("no such file mongodb://me:hunter2@host/db")
    activity = opened(tmp_path)
    with activity.until_end(lambda: 7):
        process_exit.record_failure(76, "not this rank's")
        process_exit.show_failure(DataError("another thread ends the process"))
    torn, *whole = (tmp_path / "events.jsonl").read_text().splitlines()
    ends = [json.loads(line) for line in whole]
    assert torn == '{"kind": "sa' and [end["kind"] for end in ends] == ["stopped", "failed", "failed"]
    assert [end["iteration"] for end in ends] == [5, 6, 7]
    assert ends[0]["text"] == "exiting: the kill switch is on" and "hunter2" not in ends[1]["text"]
    assert ends[2]["text"] == "another thread ends the process" and ends[2]["code"] == DataError("").exit_code


def test_other_ranks_write_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    activity = Activity()
    with activity.until_end(lambda: 3):
        activity.sampled(1, ["a"], ["b"])
        activity.saved(tmp_path / "iter_0000001")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_gone_is_one_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    activity = opened(tmp_path / "gone")
    with activity.until_end(lambda: 3):
        activity.sampled(1, ["a"], ["b"])
        activity.sampled(2, ["a"], ["b"])
    shown = capsys.readouterr().err
    assert shown.count("cannot be written") == 1 and "Training continues without it." in shown
