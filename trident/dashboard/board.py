"""All runs of the dashboard, followed by one thread, and a number that says whether anything has changed."""

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
_TURN_SECONDS = 0.25


class Board:
    """The runs in some folders. Runs join as their folders appear, and stay when those are deleted.

    Args:
        folders: folders of runs, or that hold some.
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
        """Starts to follow the runs."""
        self.search()
        self._thread.start()

    def stop(self) -> None:
        """Stops following the runs, and wakes whoever waits for changes."""
        self._is_stopping.set()
        with self._change:
            self._change.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping.is_set()

    def pause(self, seconds: float) -> None:
        """Waits, but not for longer than the dashboard runs."""
        self._is_stopping.wait(seconds)

    def search(self) -> None:
        """Takes in runs that are new."""
        for place in find_runs(self.folders):
            if place.path not in self._known:
                self._known.add(place.path)
                number = len(self.runs) + 1
                self.runs = {**self.runs, number: DashboardRun(number, place)}
        self._searched_at = time.monotonic()

    def poll(self) -> bool:
        """Reads a part of what is new in each run; returns whether there is more to read at once."""
        runs = list(self.runs.values())
        shown = [run.version for run in runs]
        for run in runs:
            run.look()
        has_more = False
        until = time.monotonic() + _TURN_SECONDS
        for run in runs:
            has_more = run.poll() or has_more
            if (time.monotonic() > until or run is runs[-1]) and (versions := [one.version for one in runs]) != shown:
                self._tell()
                until, shown = time.monotonic() + _TURN_SECONDS, versions
        return has_more

    def summaries(self, known: dict[int, int] | None = None) -> list[dict[str, Any]]:
        """The runs, or those that changed since the versions in `known`, which is brought up to date."""
        summaries = []
        for number, run in self.runs.items():
            version = run.version
            if known is None or known.get(number) != version:
                summaries.append(self._summary(run))
            if known is not None:
                known[number] = version
        return summaries

    def wait(self, changes: int, most_seconds: float) -> int:
        """Waits until there were more than `changes`; returns how many there were."""
        with self._change:
            self._change.wait_for(lambda: self._changes > changes or self.is_stopping, most_seconds)
            return self._changes

    def _summary(self, run: DashboardRun) -> dict[str, Any]:
        try:
            return run.summary()
        except Exception as failure:
            run.give_up(failure)
            return run.summary()

    def _tell(self) -> None:
        with self._change:
            self._changes += 1
            self._change.notify_all()

    def _follow(self) -> None:
        """The thread: each failure is logged once, and the thread continues."""
        said = ""
        while not self.is_stopping:
            try:
                if time.monotonic() - self._searched_at > _SEARCH_SECONDS:
                    count = len(self.runs)
                    self.search()
                    if len(self.runs) > count:
                        self._tell()
                has_more = self.poll()
            except Exception as failure:
                has_more = False
                if repr(failure) != said:
                    said = repr(failure)
                    reason = str(failure) if isinstance(failure, OSError) else f"\n{traceback.format_exc()}"
                    log.warning(f"the runs could not be read just now: {reason}")
            self._is_stopping.wait(0.001 if has_more else _POLL_SECONDS)
