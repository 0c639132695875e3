"""A run of the dashboard: follows its files as they grow, and answers requests about them."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from megatron import log
from megatron.errors import printable
from megatron.secret_text import masked
from trident.dashboard import events, records
from trident.dashboard.configuration import rows
from trident.dashboard.decimation import DecimatedCurve, decimated, smoothed, sorted_points
from trident.dashboard.discovery import CONFIG_NAME, METRICS_NAME, RunFolder
from trident.dashboard.lines import LineTail, parse_records, read_object, read_tail
from trident.dashboard.table import MetricsTable

EVENTS_NAME, SAMPLES_NAME, HEARTBEATS_NAME, LOG_NAME = "events.jsonl", "samples.jsonl", "heartbeats.json", "log.txt"
_LIVE_SECONDS = 20.0
_LIVE_WITHOUT_HEARTBEATS_SECONDS = 90.0
_LONG_FILE_BYTES = 4 << 20
_PREVIEW_POINTS = 256
_LOG_BYTES = 96 << 10
_MOST_SAMPLES = 2_000
_MOST_VIEWS = 24
_MOST_RECORDS = 10_000


@dataclass(frozen=True)
class View:
    """The selected part of a curve and its resolution.

    Attributes:
        axis: one of `table.AXES`.
        points: approximate upper limit of the points drawn.
        weight: see `smoothed`.
        between, is_logarithmic: see `decimated`.
    """

    axis: str
    points: int
    weight: float = 0.0
    between: tuple[float, float] | None = None
    is_logarithmic: bool = False


class DashboardRun:
    """A run folder. `poll` is called by one thread; all other methods by any.

    Attributes:
        version: incremented with every change that a page may show.
        problem: why the run is unreadable, or empty.
    """

    def __init__(self, number: int, folder: RunFolder) -> None:
        self.number = number
        self.folder = folder
        self.version = 1
        self.problem = ""
        self._lock = threading.Lock()
        self._tails = {name: LineTail(folder.path / name) for name in (METRICS_NAME, EVENTS_NAME, SAMPLES_NAME)}
        self._is_unreadable = False
        self._state = ""
        self._is_gone = False
        self._stamps: dict[str, tuple[int, int]] = {}
        self._table_version = 0
        self._forget()

    def _forget(self) -> None:
        self._table = MetricsTable()
        self._preview: MetricsTable | None = None
        self._has_preview = False
        self._records: dict[str, list[dict[str, Any]]] = {METRICS_NAME: [], EVENTS_NAME: []}
        self._samples: dict[int, dict[str, Any]] = {}
        self._skipped_lines = 0
        self._train_iterations = 0
        self._config: dict[str, Any] = {}
        self._smoothed: dict[tuple[str, float], tuple[int, np.ndarray]] = {}
        self._drawn: dict[tuple[str, View], list[tuple[str, DecimatedCurve]]] = {}
        self._drawn_version: tuple[int, MetricsTable | None] = (0, None)

    def poll(self) -> bool:
        """Reads some new lines; returns True if more can be read.

        A failure is set in `problem`: an I/O error until the next call, any other permanently.
        """
        has_more, problem = False, ""
        try:
            if not self._is_unreadable:
                self._is_gone = not self.folder.path.is_dir()
                has_more = False if self._is_gone else self._read()
                problem = self._problem_of_lines()
            state = "unreadable" if problem else self.state()
        except OSError as failure:
            state, problem = "unreadable", f"The folder cannot be read: {failure.strerror or failure}."
        except Exception as failure:
            self.mark_unreadable(failure)
        if self._is_unreadable:
            return False
        if (state, problem) != (self._state, self.problem):
            self._state, self.problem, self.version = state, problem, self.version + 1
        return has_more

    def mark_unreadable(self, failure: Exception) -> None:
        """Drops all data and stops reading, so that a malformed run affects no other."""
        shown = "".join(traceback.format_exception(failure))
        log.error(f"the run {printable(self.folder.name)} cannot be parsed and is skipped:\n{shown}")
        with self._lock:
            self._is_unreadable, self._state = True, "unreadable"
            self.problem = f"Its files cannot be parsed ({type(failure).__name__}: {printable(str(failure))})."
            self._forget()
            self._table_version += 1
            self.version += 1

    def load_preview(self) -> None:
        """Samples the lines of a long metrics file, to be shown until all of it is read."""
        if self._has_preview:
            return
        self._has_preview = True
        try:
            self._load_preview()
        except Exception as failure:
            self.mark_unreadable(failure)

    def _load_preview(self) -> None:
        tail = self._tails[METRICS_NAME]
        try:
            is_long = (self.folder.path / METRICS_NAME).stat().st_size > _LONG_FILE_BYTES
        except OSError:
            return
        sampled = records.metric_records(parse_records(tail.sampled(_PREVIEW_POINTS))) if is_long else []
        steps = [record for record in sampled if record["kind"] == "step"]
        if steps:
            table = MetricsTable()
            table.add(_with_hours_of_gaps(steps))
            with self._lock:
                self._preview = table
                self._train_iterations = records.whole(steps[-1].get("train_iterations")) or 0
                self.version += 1

    def state(self) -> str:
        """running, finished, stopped, failed, lost (no heartbeat), idle (unknown), gone (deleted) or unreadable."""
        if self._is_unreadable:
            return "unreadable"
        if self._is_gone:
            return "gone"
        end = events.end_of([*self._records[METRICS_NAME], *self._records[EVENTS_NAME]])
        if end:
            return end
        beat_age = _age(self.folder.path / HEARTBEATS_NAME)
        if beat_age is not None:
            return "running" if beat_age < _LIVE_SECONDS else "lost"
        age = _age(self.folder.path / METRICS_NAME)
        if age is not None and age < _LIVE_WITHOUT_HEARTBEATS_SECONDS:
            return "running"
        table = self._shown_table()
        done = table.count and int(table.axis("steps")[-1]) >= self._train_iterations > 0
        return "finished" if done else "idle"

    def summary(self) -> dict[str, Any]:
        with self._lock:
            table, tail = self._shown_table(), self._tails[METRICS_NAME]
            steps = table.axis("steps")
            starts = [record for record in self._records[METRICS_NAME] if record["kind"] == "start"]
            seconds = table.column("seconds_per_iteration")[-50:].astype(np.float64)
            left = max(0, self._train_iterations - int(steps[-1])) if len(steps) else 0
            pace = float(np.nanmean(seconds)) if np.isfinite(seconds).any() and self._preview is None else None
            return {
                "id": self.number,
                "name": self.folder.name,
                "version": self.version,
                "state": self._state,
                "problem": self.problem,
                "iteration": int(steps[-1]) if len(steps) else 0,
                "train_iterations": self._train_iterations,
                "loss": table.last("lm_loss"),
                "tokens_per_second": table.last("tokens_per_second"),
                "eta_seconds": records.number(left * pace) if pace is not None and self._state == "running" else None,
                "points": table.count,
                "repeated_steps": table.repeated_steps,
                "reading": 1.0 if self._preview is None else tail.progress if tail.size_bytes else 0.0,
                "starts": len(starts),
                "samples": len(self._samples),
                "metrics": table.metrics(),
                "layout": self._layout(),
                "changed_at": tail.changed_at,
            }

    def curves(self, metric: str, view: View) -> list[tuple[str, DecimatedCurve]]:
        """The training curve of a metric with group "", then its evaluation curves with their groups."""
        with self._lock:
            if self._drawn_version != (self._table_version, self._preview):
                self._drawn_version, self._drawn = (self._table_version, self._preview), {}
            known = self._drawn.get((metric, view))
            if known is None:
                if len(self._drawn) >= _MOST_VIEWS:
                    del self._drawn[next(iter(self._drawn))]
                known = self._drawn[metric, view] = list(self._draw(metric, view))
            return known

    def details(self) -> dict[str, Any]:
        """The data of the panels other than curves, log and configuration."""
        with self._lock:
            table = self._shown_table()
            dated = [*self._records[METRICS_NAME], *self._records[EVENTS_NAME]]
            skips = events.from_skips(
                table.axis("steps"), table.column("skipped_iterations"), table.column("nan_iterations")
            )
            chronological = events.with_skips(list(events.from_records(dated)), skips)
            samples = [self._samples[step] for step in sorted(self._samples)]
        heartbeats = records.heartbeats_record(read_object(self.folder.path / HEARTBEATS_NAME) or {})
        return {
            "events": [event.to_json() for event in chronological],
            "samples": samples,
            "layout": self._layout(),
            "heartbeats": heartbeats,
            "heartbeats_age_seconds": _age(self.folder.path / HEARTBEATS_NAME),
        }

    def configuration(self) -> dict[str, Any]:
        """The configuration of the last start."""
        return read_object(self.folder.path / CONFIG_NAME) or {}

    def configuration_rows(self) -> dict[str, str]:
        return rows(self.configuration())

    def log_tail(self) -> tuple[str, int]:
        """The end of the log without secrets and control characters, and the size of the log in bytes."""
        text, size = read_tail(self.folder.path / LOG_NAME, _LOG_BYTES)
        shown = "".join(letter if letter.isprintable() or letter in "\n\t" else "�" for letter in text)
        return "\n".join(masked(line) for line in shown.split("\n")), size

    def save_folder(self) -> Path | None:
        """The checkpoint folder set in the configuration."""
        saving = self._config.get("saving")
        folder = saving.get("save") if isinstance(saving, dict) else None
        return Path(folder) if isinstance(folder, str) and folder else None

    def _read(self) -> bool:
        changed = self._read_config()
        with self._lock:
            part = self._tails[METRICS_NAME].read()
            if part.is_new:
                self._table, self._records[METRICS_NAME], self._train_iterations = MetricsTable(), [], 0
                self._preview, self._skipped_lines = None, 0
            new = records.metric_records(parse_records(part.lines))
            self._skipped_lines += len(part.lines) - len(new)
            self._table.add(new)
            self._keep(METRICS_NAME, [one for one in new if one["kind"] in ("start", "passed")])
            steps = [one for one in new[-50:] if one["kind"] == "step"]
            if steps:
                self._train_iterations = records.whole(steps[-1].get("train_iterations")) or 0
            if part.lines or part.is_new:
                self._table_version += 1
                changed = changed or self._preview is None
            if not part.has_more and self._preview is not None:
                self._preview, changed = None, True
        changed = self._read_small_files() or changed
        self.version += int(changed)
        return part.has_more

    def _read_small_files(self) -> bool:
        changed = False
        with self._lock:
            for name in (EVENTS_NAME, SAMPLES_NAME):
                part = self._tails[name].read()
                changed = changed or part.is_new or bool(part.lines)
                if name == EVENTS_NAME:
                    self._records[name] = [] if part.is_new else self._records[name]
                    self._keep(name, records.event_records(parse_records(part.lines)))
                    continue
                self._samples = {} if part.is_new else self._samples
                for record in records.sample_records(parse_records(part.lines)):
                    for step in [step for step in self._samples if step >= record["iteration"]]:
                        del self._samples[step]
                    self._samples[record["iteration"]] = record
                for step in sorted(self._samples)[:-_MOST_SAMPLES]:
                    del self._samples[step]
        return changed | self._is_changed(HEARTBEATS_NAME) | self._is_changed(LOG_NAME)

    def _problem_of_lines(self) -> str:
        lines = self._skipped_lines
        if not lines or self._table.count or self._table.evaluations or self._records[METRICS_NAME]:
            return ""
        return f"None of the {lines:,} lines read from {METRICS_NAME} is a record of a run."

    def _keep(self, name: str, new: list[dict[str, Any]]) -> None:
        self._records[name] = [*self._records[name], *new][-_MOST_RECORDS:]

    def _read_config(self) -> bool:
        if not self._is_changed(CONFIG_NAME):
            return False
        self._config = self.configuration()
        return True

    def _is_changed(self, name: str) -> bool:
        try:
            status = (self.folder.path / name).stat()
        except OSError:
            return self._stamps.pop(name, None) is not None
        stamp = (status.st_size, status.st_mtime_ns)
        is_changed = self._stamps.get(name) != stamp
        self._stamps[name] = stamp
        return is_changed

    def _draw(self, metric: str, view: View) -> Iterator[tuple[str, DecimatedCurve]]:
        table = self._shown_table()
        values, x = table.column(metric), table.axis(view.axis)
        if len(values):
            line = self._smooth(metric, values, view.weight)
            yield "", self._part(x, values, line, view)
        for group, (positions, losses) in table.evaluation_curves(metric, view.axis).items():
            yield group, self._part(positions, losses, losses, view)

    def _part(self, x: np.ndarray, values: np.ndarray, line: np.ndarray, view: View) -> DecimatedCurve:
        x, values, line = sorted_points(x, values, line)
        return decimated(x, values, line, view.points, view.between, is_logarithmic=view.is_logarithmic)

    def _shown_table(self) -> MetricsTable:
        return self._preview or self._table

    def _smooth(self, metric: str, values: np.ndarray, weight: float) -> np.ndarray:
        version = -1 if self._preview is not None else self._table_version
        known = self._smoothed.get((metric, weight))
        if known is None or known[0] != version:
            # Only the present weight is requested again.
            self._smoothed = {key: value for key, value in self._smoothed.items() if key[1] == weight}
            known = self._smoothed[metric, weight] = (version, smoothed(values, weight))
        return known[1]

    def _layout(self) -> dict[str, int]:
        return records.layout(self._config)


def _with_hours_of_gaps(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Multiplies the time of sampled steps by the number of steps that each stands for."""
    previous = 0
    for record in steps:
        gap = max(1, record["iteration"] - previous)
        previous += gap
        if "seconds_per_iteration" in record:
            record["seconds_per_iteration"] *= gap
    return steps


def _age(path: Path) -> float | None:
    """Seconds since a file was written; None if it does not exist."""
    try:
        return max(0.0, time.time() - path.stat().st_mtime)
    except OSError:
        return None
