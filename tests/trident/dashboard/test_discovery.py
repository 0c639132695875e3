"""Which folders are runs, and by which names they go."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.errors import DataError
from trident.dashboard.discovery import check_folders, find_runs


def make(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_runs_are_found_below_a_folder_and_links_are_not_followed(tmp_path: Path) -> None:
    runs, other = tmp_path / "runs", tmp_path / "other"
    make(runs / "a/metrics.jsonl", runs / "deep/b/metrics.jsonl", runs / "c/config.json", runs / "c/log.txt")
    make(runs / "a/nested/metrics.jsonl", runs / "iter_0000004/config.json", runs / "iter_0000004/log.txt")
    make(
        runs / ".hidden/metrics.jsonl",
        runs / "1/2/3/4/metrics.jsonl",
        other / "x/metrics.jsonl",
        runs / "half/config.json",
    )
    (runs / "link").symlink_to(other)
    assert [place.name for place in find_runs([runs])] == ["a", "c", "deep/b"]
    names = [place.name for place in find_runs([runs, other, runs / "a"])]
    assert names == ["other/x", "runs/a", "runs/c", "runs/deep/b"]
    assert [place.name for place in find_runs([runs / "a"])] == ["a"]
    assert find_runs([tmp_path / "missing"]) == []


def test_what_is_no_folder_is_refused(tmp_path: Path) -> None:
    make(tmp_path / "run/metrics.jsonl")
    assert check_folders([str(tmp_path / "run/metrics.jsonl"), str(tmp_path)]) == [tmp_path / "run", tmp_path]
    with pytest.raises(DataError, match="missing is not a folder. Give the folder of a run"):
        check_folders([str(tmp_path / "missing")])
