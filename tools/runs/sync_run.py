"""Copies the folder of a run to a directory or to another machine, so that it can continue there.

    python tools/runs/sync_run.py logs/gentle_lovelace-26112211 --to /mnt/archive
    python tools/runs/sync_run.py logs/gentle_lovelace-26112211 --to ubuntu@192.0.2.7:runs --every-seconds 300

Only complete checkpoints are copied. Every byte that arrives is compared with its digest before the checkpoint gets its
name there. An interrupted copy continues where it stopped, an up-to-date one sends nothing, and a step that the run has
saved again is copied again. The other machine is reached with `ssh`, which must not ask for a password. The same
command continues a copy.
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

    run: str = flag(help="folder of the run; the flag's name may be left out", path=PathUse.FOLDER)
    to: str = flag(help="directory that the folder is copied into, or user@host:directory", path=PathUse.FOLDER)
    every_seconds: int | None = flag(None, "copy repeatedly, with this many seconds in between", at_least=1)


def main(argv: Sequence[str] | None = None) -> int:
    """Copies the run."""
    flags = parse_flags(
        SyncFlags,
        sys.argv[1:] if argv is None else argv,
        prog="sync_run.py",
        description=__doc__ or "",
        positional="--run",
    )
    for _ in _turns(flags.every_seconds):
        try:
            _copy(flags)
        except (DamagedError, StorageError) as failure:
            if flags.every_seconds is None:
                raise
            log.warning(f"{failure} The next round tries again.")
    return 0


def _turns(every_seconds: int | None) -> Iterator[None]:
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
