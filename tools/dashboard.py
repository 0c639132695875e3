"""Serves a page with the runs of some folders: curves, samples, ranks, checkpoints, events and logs, live.

    python tools/dashboard.py runs --port 6007

Only reads the files of the runs. The server listens on 127.0.0.1; to access it from another machine, forward the port:
ssh -L 6007:localhost:6007 HOST. See docs/dashboard.md.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megatron import log, process_exit
from megatron.config import ConfigSection, PathUse, flag, parse_flags

if TYPE_CHECKING:
    from trident.dashboard.server import DashboardServer


@dataclass(frozen=True)
class DashboardFlags(ConfigSection):
    """Flags of this program."""

    runs: tuple[str, ...] = flag(
        ("runs",),
        "run folders, or folders that contain some; also accepted as positional arguments",
        nargs="+",
        path=PathUse.FILE_OR_FOLDER,
    )
    port: int = flag(6007, "port of the server; 0 for a free one", at_least=0, at_most=65535)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves the page until Ctrl-C or SIGTERM."""
    flags = parse_flags(
        DashboardFlags,
        sys.argv[1:] if argv is None else argv,
        description=__doc__ or "",
        positional="--runs",
    )
    server = open_server(flags.runs, flags.port)
    process_exit.interrupt_on_sigterm()
    count = len(server.board.runs)
    log.line(f"{count} run{'s' * (count != 1)} in {', '.join(flags.runs)}: {server.address} (Ctrl-C to stop)")
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        log.line("stopped")
    finally:
        server.board.stop()
        server.server_close()
    return 0


def open_server(folders: Sequence[str], port: int) -> DashboardServer:
    """Opens the server, listening, with its runs."""
    from trident.dashboard.board import Board
    from trident.dashboard.discovery import check_folders
    from trident.dashboard.server import ADDRESS, DashboardServer
    from trident.serve.access import Access, allowed_hosts
    from trident.serve.requests.refusals import Refusal

    board = Board(check_folders(folders))
    access = Access(hosts=allowed_hosts(ADDRESS, ()), open_paths=frozenset({"/"}))

    def check(path: str, headers: Mapping[str, str]) -> tuple[int, str] | None:
        try:
            access.check(path, headers)
        except Refusal as refusal:
            return refusal.status, refusal.message
        return None

    server = DashboardServer(board, port, check, list_checkpoints)
    board.start()
    return server


def list_checkpoints(folder: Path) -> list[dict[str, Any]]:
    """The checkpoints of a folder with their state; none if the folder does not exist or cannot be read."""
    from megatron.checkpoint.storage import Storage
    from megatron.errors import StorageError
    from trident.checkpoints.listing import entries_in

    if not os.path.isdir(folder):
        return []
    try:
        return [entry.to_json() for entry in entries_in(folder, Storage())]
    except (StorageError, OSError):
        return []


if __name__ == "__main__":
    process_exit.exit_with(main)
