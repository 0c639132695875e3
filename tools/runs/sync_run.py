"""Copies a run folder to a directory or another machine, where the run can be resumed.

    python tools/runs/sync_run.py logs/gentle_lovelace-26112211 --to /mnt/archive
    python tools/runs/sync_run.py logs/gentle_lovelace-26112211 --to ubuntu@192.0.2.7:runs --every-seconds 300

Only complete checkpoints are copied, and every byte is verified against its digest before a checkpoint is published.
The same command resumes an interrupted copy and updates a finished one, including steps that the run has saved again.
Remote machines are accessed with `ssh`, which must not require a password.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags
from megatron.errors import DamagedError, StorageError


@dataclass(frozen=True)
class SyncFlags(ConfigSection):
    """Flags of this tool."""

    run: str = flag(help="run folder; also accepted as a positional argument", path=PathUse.FOLDER)
    to: str = flag(help="target directory, or user@host:directory", path=PathUse.FOLDER)
    every_seconds: int | None = flag(None, "repeat the copy with this interval in seconds", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Copies the run."""
    flags = parse_flags(
        SyncFlags,
        sys.argv[1:] if argv is None else argv,
        prog="sync_run.py",
        description=__doc__ or "",
        positional="--run",
    )
    for _ in _rounds(flags.every_seconds):
        try:
            _copy(flags)
        except (DamagedError, StorageError) as failure:
            if flags.every_seconds is None:
                raise
            log.warning(f"{failure} Retrying in the next round.")
    return 0


def _rounds(every_seconds: int | None) -> Iterator[None]:
    yield
    while every_seconds is not None:
        time.sleep(every_seconds)
        yield


def _copy(flags: SyncFlags) -> None:
    from trident.checkpoints.run_copy import RunCopy, parse_target

    target = parse_target(flags.to)
    copy = RunCopy(Path(flags.run), target, log.line)
    copy.update()
    log.line(
        f"{target}: sent {len(copy.checkpoints)} checkpoints and {len(copy.files)} other files, {copy.size_bytes} bytes"
    )


if __name__ == "__main__":
    process_exit.exit_with(main)
