"""Folders a run will write to are looked at, and not made."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron import log
from megatron.config.parse import read_flags
from megatron.train.preflight import inputs
from megatron.train.preflight.inputs import place_failures, unwritable_reason


def test_a_folder_that_is_there_or_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    (tmp_path / "away").symlink_to(tmp_path / "gone")
    (tmp_path / "here").symlink_to(tmp_path)
    for folder in (tmp_path, tmp_path / "a" / "b", tmp_path / "here" / "c"):
        assert unwritable_reason(folder) == ""
    assert unwritable_reason(tmp_path / "file") == f"{tmp_path}/file is not a folder"
    assert unwritable_reason(tmp_path / "file" / "a" / "b") == f"{tmp_path}/file is not a folder"
    assert unwritable_reason(tmp_path / "away" / "a") == f"{tmp_path}/away is a dangling link"
    assert unwritable_reason(tmp_path / "{run}" / "file") == "", "the name is not known yet"
    monkeypatch.setattr(inputs.os, "access", lambda path, mode: Path(path) != tmp_path or not mode & os.W_OK)
    assert unwritable_reason(tmp_path / "a") == f"this user may not write in {tmp_path}"


def test_only_rank_0_looks_and_the_default_folder_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").touch()
    request = read_flags(["--metrics-file", "runs/metrics.jsonl"]).unchecked()
    assert [str(failure) for failure in place_failures(request)] == [
        f"--run-dir runs (the default) cannot be written: {tmp_path}/runs is not a folder. Use another folder.",
        f"--metrics-file runs/metrics.jsonl cannot be written: {tmp_path}/runs is not a folder. Use another file.",
    ]
    monkeypatch.setattr(log, "is_first_rank", lambda: False)
    assert list(place_failures(request)) == []
