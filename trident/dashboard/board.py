"""All runs of the dashboard, followed by one thread, and a counter of changes."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from megatron import log
from trident.dashboard.discovery import find_runs
from trident.dashboard.followed_run import DashboardRun

_POLL_SECONDS = 0.5
_SEARCH_SECONDS = 3.0
_NOTIFY_SECONDS = 0.25


class Board:
    """The runs in some folders. Runs are added as their folders appear, and kept when those are deleted.

    Args:
        folders: run folders, or folders that contain some.
    """

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = tuple(folders)
        self.runs: dict[int, DashboardRun] = {}
        self._known: set[Path] = set()
        self._searched_at = 0.0
        self._change = threading.Condition()
        self._changes = 0
        self._is_stopping = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="dashboard", daemon=True)

    def start(self) -> None:
        """Starts the thread that follows the runs."""
        self.search()
        self._thread.start()

    def stop(self) -> None:
        """Stops following the runs, and wakes all waiting threads."""
        self._is_stopping.set()
        with self._change:
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping.is_set()

    def pause(self, seconds: float) -> None:
        """Sleeps, or returns early when the board is stopped."""
        self._is_stopping.wait(seconds)

    def search(self) -> None:
        """Adds new runs."""
        for folder in find_runs(self.folders):
            if folder.path not in self._known:
                self._known.add(folder.path)
                number = len(self.runs) + 1
                self.runs = {**self.runs, number: DashboardRun(number, folder)}
        self._searched_at = time.monotonic()

    def poll(self) -> bool:
        """Reads some new lines of each run; returns True if more can be read immediately."""
        runs = list(self.runs.values())
        shown = [run.version for run in runs]
        for run in runs:
            run.load_preview()
        has_more = False
        deadline = time.monotonic() + _NOTIFY_SECONDS
        for run in runs:
            has_more = run.poll() or has_more
            is_due = time.monotonic() > deadline or run is runs[-1]
            if is_due and (versions := [one.version for one in runs]) != shown:
                self._notify()
                deadline, shown = time.monotonic() + _NOTIFY_SECONDS, versions
        return has_more

    def summaries(self, known: dict[int, int] | None = None) -> list[dict[str, Any]]:
        """The runs, or those that changed since the versions in `known`; updates `known`."""
        summaries = []
        for number, run in self.runs.items():
            version = run.version
            if known is None or known.get(number) != version:
                summaries.append(self._summary(run))
            if known is not None:
                known[number] = version
        return summaries

    def wait(self, changes: int, most_seconds: float) -> int:
        """Waits for more than `changes` changes; returns their number."""
        with self._change:
            self._change.wait_for(lambda: self._changes > changes or self.is_stopping, most_seconds)
            return self._changes

    def _summary(self, run: DashboardRun) -> dict[str, Any]:
        try:
            return run.summary()
        except Exception as failure:
            run.mark_unreadable(failure)
            return run.summary()

    def _notify(self) -> None:
        with self._change:
            self._changes += 1
            self._change.notify_all()

    def _follow(self) -> None:
        logged = ""  # each failure is logged once, and the thread continues
        while not self.is_stopping:
            try:
                if time.monotonic() - self._searched_at > _SEARCH_SECONDS:
                    count = len(self.runs)
                    self.search()
                    if len(self.runs) > count:
                        self._notify()
                has_more = self.poll()
            except Exception as failure:
                has_more = False
                if repr(failure) != logged:
                    logged = repr(failure)
                    reason = str(failure) if isinstance(failure, OSError) else f"\n{traceback.format_exc()}"
                    log.warning(f"the runs cannot be read at the moment: {reason}")
            self._is_stopping.wait(0.001 if has_more else _POLL_SECONDS)
