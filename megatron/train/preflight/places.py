"""Folders that the run writes to: whether they are there, or can be made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from megatron import log
from megatron.config.run import RunRequest
from megatron.errors import StorageError


def place_failures(request: RunRequest) -> Iterator[StorageError]:
    """What cannot be written of that which a run must write.

    Only rank 0 looks: the other ranks write into folders that it has made, and some of them nothing at all.
    """
    if not log.is_first_rank():
        return
    report = request.report
    asked = {
        "--save": request.saving.save,
        "--run-dir": report.run_dir or "runs",
        "--tensorboard-dir": report.tensorboard_dir,
        "--log-path": report.log_path,
    }
    for flag, folder in asked.items():
        reason = None if folder is None else why_no_folder(Path(folder))
        if reason:
            shown = folder if flag != "--run-dir" or report.run_dir else f"{folder} (the default)"
            yield StorageError(f"{flag} {shown} cannot be written: {reason}. Give another folder.")
    if report.metrics_file is not None:
        reason = why_no_folder(Path(report.metrics_file).parent)
        if not reason and os.path.isdir(report.metrics_file):
            reason = "it is a folder"
        if reason:
            yield StorageError(f"--metrics-file {report.metrics_file} cannot be written: {reason}. Give another file.")


def why_no_folder(folder: Path) -> str:
    """Why a folder cannot be written to, or be made; empty if it may be possible.

    Of a name that contains `{run}`, only the part before it is checked.
    """
    parts = folder.absolute().parts
    known = next((number for number, part in enumerate(parts) if "{" in part), len(parts))
    path = Path(*parts[:known])
    nearest = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not os.path.isdir(nearest):
        return f"{nearest} is not a folder" if os.path.exists(nearest) else f"{nearest} is a link to nothing"
    if not os.access(nearest, os.W_OK | os.X_OK):
        return f"this user may not write in {nearest}"
    return ""
