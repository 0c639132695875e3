"""Finds run directories, for helpful errors when a requested run does not exist."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import DataError
from megatron.observe.metrics_file import FILE_NAME

_SHOWN_RUNS = 5


def check_run(path: str | Path) -> None:
    """Checks that a run directory or metrics file exists.

    Raises:
        DataError: it does not; the message names the newest runs under `runs/`, the trainer's default place.
    """
    if Path(path).exists():
        return
    newest = newest_runs(Path("runs"))
    shown = f" The newest under runs/: {', '.join(map(str, newest))}." if newest else ""
    raise DataError(f"{path} does not exist. Give a run directory or its {FILE_NAME}.{shown}")


def newest_runs(folder: Path, count: int = _SHOWN_RUNS) -> list[Path]:
    """Run directories in a folder that contain metrics, most recently written first."""
    written_at = {}
    for path in folder.glob(f"*/{FILE_NAME}"):
        try:
            if not path.parent.is_symlink():
                written_at[path.parent] = path.stat().st_mtime_ns
        except OSError:  # removed in the meantime
            continue
    return sorted(written_at, key=lambda run: (-written_at[run], run.name))[:count]
