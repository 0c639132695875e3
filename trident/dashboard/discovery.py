"""Finds the run folders below some folders."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from megatron.errors import DataError

METRICS_NAME, CONFIG_NAME = "metrics.jsonl", "config.json"
_DEEPEST = 4
_MOST_FOLDERS = 20_000
_NEVER_RUNS = ("iter_", "global_step", ".")


@dataclass(frozen=True)
class RunFolder:
    """The folder of a run, and its display name."""

    path: Path
    name: str


def check_folders(folders: Sequence[str]) -> list[Path]:
    """Checks that all paths are folders; a metrics file stands for its folder.

    Raises:
        DataError: one does not exist or is not a folder.
    """
    paths = []
    for text in folders:
        path = Path(text)
        if path.name == METRICS_NAME and path.is_file():
            path = path.parent
        if not path.is_dir():
            raise DataError(
                f"{text} is not a folder. Give the folder of a run (--run-dir of pretrain_gpt.py), or one containing "
                "such folders, like runs/."
            )
        paths.append(path)
    return paths


def find_runs(folders: Sequence[Path]) -> list[RunFolder]:
    """The runs in some folders and a few levels below, sorted by name; symbolic links are not followed."""
    runs: dict[Path, RunFolder] = {}
    for folder in folders:
        for path in _runs_in(folder):
            relative = path.relative_to(folder).as_posix()
            name = folder.resolve().name if relative == "." else relative
            if len(folders) > 1 and relative != ".":
                name = f"{folder.resolve().name}/{name}"
            runs.setdefault(path.resolve(), RunFolder(path, name))
    return sorted(runs.values(), key=lambda run: run.name)


def _runs_in(folder: Path) -> Iterator[Path]:
    visited = 0
    level = [folder]
    for _ in range(_DEEPEST):
        below: list[Path] = []
        for path in level:
            visited += 1
            if visited > _MOST_FOLDERS:
                return
            names, folders = _entries(path)
            if METRICS_NAME in names or {CONFIG_NAME, "log.txt"} <= names:
                yield path
            else:
                below += [path / name for name in folders]
        level = below


def _entries(path: Path) -> tuple[set[str], list[str]]:
    """The names of the files, and of the folders that may be or contain runs."""
    files, folders = set(), []
    try:
        with os.scandir(path) as entries:
            for entry in entries:
                if entry.is_dir(follow_symlinks=False):
                    folders += [] if entry.name.startswith(_NEVER_RUNS) else [entry.name]
                elif entry.is_file(follow_symlinks=False):
                    files.add(entry.name)
    except OSError:  # deleted meanwhile, or not readable
        return set(), []
    return files, sorted(folders)
