"""A dashboard that listens, as tools/dashboard.py starts it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tools.dashboard import open_server
from trident.dashboard.server import DashboardServer


@contextmanager
def listening(*folders: Path) -> Iterator[DashboardServer]:
    """Serves some folders on a free port."""
    server = open_server([str(folder) for folder in folders], 0)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.board.stop()
        server.server_close()
        thread.join()
