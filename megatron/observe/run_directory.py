"""The run directory: resolved configuration, state of the source code, metrics and log.

    runs/<name>-<date>-<time>/
        config.json    every resolved argument and the origin of its value
        git.txt        commit and changed files of the checkout; git.diff contains the changes
        metrics.jsonl  one record per step (see metrics_file.py)
        log.txt        log output of rank 0

A program may choose other names for git.txt and git.diff (--run-files), and add a file with its own flags.

Only rank 0 writes here. When a run resumes in its folder, files of earlier starts are kept as config.1.json,
config.2.json, ...
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.config.flags.program import RunFileNames
from megatron.errors import ConfigError, StorageError
from megatron.files.replacing import move, replace_file
from megatron.observe.metrics_file import FILE_NAME
from megatron.secret_text import masked, masked_values

_GIT_SECONDS = 20.0
MEGATRON_FILES = RunFileNames("git.txt", "git.diff")


@dataclass(frozen=True)
class RunDirectory:
    """The paths in a run directory."""

    path: Path

    @property
    def metrics_path(self) -> Path:
        return self.path / FILE_NAME

    @property
    def log_path(self) -> Path:
        """A copy of rank 0's log output."""
        return self.path / "log.txt"


def open_run_directory(
    run_dir: str | None,
    config: Mapping[str, Any],
    *,
    name: str = "gpt",
    is_resume: bool = False,
    source: Path | None = None,
    names: RunFileNames = MEGATRON_FILES,
    program_flags: str | None = None,
) -> RunDirectory:
    """Creates the run directory and writes the description of the run; called on rank 0 only.

    Args:
        run_dir: the folder (--run-dir); None to create a new one under `runs/`.
        config: the resolved configuration as JSON.
        name: prefix of a new folder's name.
        is_resume: the run resumes from a checkpoint (--load), so that the folder may already contain a run.
        source: a file of the checkout whose state is recorded; by default this program's.
        names: file names (--run-files).
        program_flags: the JSON of the program's own flags (--program-flags).

    Raises:
        ConfigError: the folder holds another run.
        StorageError: the folder cannot be created or written.
    """
    try:
        path = _new_folder(Path("runs"), name) if run_dir is None else _given_folder(Path(run_dir), is_resume)
        _keep_earlier(path, names)
        _write(path / "config.json", json.dumps(masked_values(config), indent=2, default=str) + "\n")
        if names.flags is not None:
            _write(path / names.flags, json.dumps(masked_values(json.loads(program_flags or "{}")), indent=2) + "\n")
        _describe_source(path, names, source or Path(__file__))
    except OSError as failure:
        raise StorageError(
            f"The run directory {run_dir or 'runs/'} cannot be written: {failure.strerror} ({failure.filename}). Use "
            "another (--run-dir)."
        ) from failure
    return RunDirectory(path)


def write_arguments(log_path: str, lines: Sequence[str]) -> Path:
    """Writes the argument lines to a separate file, as upstream's --log-path does.

    Raises:
        StorageError: the folder cannot be written.
    """
    folder = Path(log_path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"args_{time.strftime('%Y-%m-%dT%H:%M:%S')}.txt"
        _write(path, "\n".join(map(masked, lines)) + "\n")
    except OSError as failure:
        raise StorageError(
            f"--log-path {log_path} cannot be written: {failure.strerror}. Choose another folder."
        ) from failure
    return path


def _new_folder(parent: Path, name: str) -> Path:
    """Creates a new folder; two starts within one second get different names."""
    clean = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "run"
    parent.mkdir(parents=True, exist_ok=True)
    stem = f"{clean}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = 1
    while True:
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            number += 1
        else:
            return path


def _given_folder(path: Path, is_resume: bool) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    if (path / "config.json").exists() and not is_resume:
        raise ConfigError(
            f"--run-dir {path} already contains a run. Use another folder for a new run, or resume the existing run "
            "from its checkpoint (--load)."
        )
    return path


def _keep_earlier(path: Path, names: RunFileNames) -> None:
    if not (path / "config.json").exists():
        return
    number = 1
    while (path / f"config.{number}.json").exists():
        number += 1
    for name in ("config.json", names.commit, names.changes, *filter(None, [names.flags])):
        stem, _, ending = name.rpartition(".")
        if (path / name).exists():
            move(path / name, path / f"{stem}.{number}.{ending}", durable=False)


def _write(path: Path, content: str | bytes) -> None:
    replace_file(path, content.encode() if isinstance(content, str) else content)


def _describe_source(path: Path, names: RunFileNames, source: Path) -> None:
    """Records commit, changed files and diff of the checkout that contains `source`."""
    folder = source.resolve().parent
    if _git(folder, "ls-files", "--error-unmatch", "--", str(source.resolve())) is None:
        _write(path / names.commit, f"not a git checkout, or git is not installed: {folder}\n")
        _write(path / names.changes, "")
        return
    root = Path(os.fsdecode((_git(folder, "rev-parse", "--show-toplevel") or os.fsencode(folder)).rstrip(b"\n")))
    commit = _git(root, "rev-parse", "--verify", "--quiet", "HEAD")
    base = commit or _git(root, "hash-object", "-t", "tree", "/dev/null") or b""
    status = _git(root, "status", "--porcelain") or b""
    known = commit or b"none yet\n"
    _write(path / names.commit, known if names.commit_is_alone else b"commit " + known + status)
    changes = _git(root, "diff", "--no-ext-diff", "--no-textconv", os.fsdecode(base.strip()), "--")
    _write(path / names.changes, changes or b"")


def _git(folder: Path, *arguments: str) -> bytes | None:
    """Output of a git command; None if it failed, timed out, or git is missing."""
    command = ["git", "--no-optional-locks", "-c", "core.fsmonitor=false", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_SECONDS, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
