"""Which runs there are: what to say when a run that was asked for is not one of them."""

from __future__ import annotations

from pathlib import Path

from megatron.errors import DataError
from megatron.observe.metrics_file import FILE_NAME

_SHOWN_RUNS = 5


def check_run(path: str | Path) -> None:
    """Checks that a run directory or metrics file is there.

    Raises:
        DataError: it is not; the text names the newest runs under `runs/`, where the trainer puts them.
    """
    if Path(path).exists():
        return
    newest = newest_runs(Path("runs"))
    shown = f" The newest under runs/: {', '.join(map(str, newest))}." if newest else ""
    raise DataError(f"{path} does not exist. Give a run directory or its {FILE_NAME}.{shown}")


def newest_runs(folder: Path, count: int = _SHOWN_RUNS) -> list[Path]:
    """Run directories in a folder that have logged something, the last written first."""
    written_at = {}
    for path in folder.glob(f"*/{FILE_NAME}"):
        try:
            if not path.parent.is_symlink():
                written_at[path.parent] = path.stat().st_mtime_ns
        except OSError:  # removed meanwhile
            continue
    return sorted(written_at, key=lambda run: (-written_at[run], run.name))[:count]
