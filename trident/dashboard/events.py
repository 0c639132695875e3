"""The events of a run as sentences in chronological order: starts, resumes, saves, skips, stops."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.secret_text import masked

_MOST_SKIPS = 200
_ENDS = {"finished": "good", "stopped": "notice", "failed": "bad"}


@dataclass(frozen=True)
class Event:
    """An event of a run.

    Attributes:
        kind: start, resume, save, failed_save, passed, skip, finished, stopped, failed, or lost.
        level: good, notice, bad, or empty.
        at: seconds since 1970; None if only the step is known.
        iteration: the step; None if unknown.
    """

    kind: str
    text: str
    level: str = ""
    at: float | None = None
    iteration: int | None = None

    def to_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text, "level": self.level, "at": self.at, "iteration": self.iteration}


def from_records(records: Sequence[Mapping[str, Any]]) -> Iterator[Event]:
    """The events recorded in `metrics.jsonl` and `events.jsonl`.

    Args:
        records: valid records of both files, without steps and evaluations.
    """
    is_open = False
    for record in sorted(records, key=_recorded_at):
        kind, at, iteration = record["kind"], record.get("at"), record.get("iteration")
        text = masked(record.get("text", ""))
        if kind == "start":
            step = record.get("step") or 0
            if is_open:
                yield Event("lost", "The previous start ended without a message: it was killed.", "bad", at)
            is_open = True
            ranks = record.get("world_size")
            on = f" on {ranks} rank{'s' * (ranks != 1)}" if ranks else ""
            if step:
                yield Event("resume", f"Resumed after step {step:,}{on}.", "notice", at, step)
            else:
                yield Event("start", f"Started{on}.", "", at, 0)
        elif kind == "save":
            yield Event("save", f"Saved {text}.", "good", at, iteration)
        elif kind == "failed_save":
            yield Event("failed_save", f"Step {iteration or 0:,} was not saved: {text}", "bad", at, iteration)
        elif kind == "slowest_rank":
            yield Event("slowest_rank", f"Slowest: {text}.", "", at, iteration)
        elif kind == "straggler":
            yield Event("straggler", f"A rank is a straggler: {text}.", "notice", at, iteration)
        elif kind == "passed":
            batch = f"samples {record.get('first_sample')} to {record.get('last_sample')}"
            reason = "on which earlier starts ended in NaN"
            yield Event("passed", f"Skipped a batch ({batch}) {reason}.", "notice", at, iteration)
        elif kind in _ENDS:
            is_open = False
            yield Event(kind, text or f"The run {kind}.", _ENDS[kind], at, iteration)


def from_skips(steps: np.ndarray, skipped: np.ndarray, bad: np.ndarray) -> Iterator[Event]:
    """The skipped updates; consecutive ones are one event. Only the last events are returned.

    Shapes: each `[steps]`.

    Args:
        skipped, bad: the columns `skipped_iterations` and `nan_iterations`.
    """
    rows = np.flatnonzero((skipped > 0) | (bad > 0)) if len(skipped) == len(bad) == len(steps) else np.empty(0, int)
    if not len(rows):
        return
    for group in np.split(rows, np.flatnonzero(np.diff(rows) > 1) + 1)[-_MOST_SKIPS:]:
        first, last = int(steps[group[0]]), int(steps[group[-1]])
        where = f"step {first:,}" if first == last else f"steps {first:,} to {last:,}"
        not_finite = int(np.count_nonzero(bad[group] > 0))
        reason = " The loss or the gradient was not finite." if not_finite else ""
        updates = "1 update was" if len(group) == 1 else f"{len(group)} updates were"
        yield Event("skip", f"{updates} skipped at {where}.{reason}", "bad" if not_finite else "notice", None, last)


def with_skips(dated: Sequence[Event], skips: Iterable[Event]) -> list[Event]:
    """Inserts skips, whose time is unknown, after the last event at or before their step."""
    events = list(dated)
    for skip in skips:
        before = [index for index, event in enumerate(events) if (event.iteration or 0) <= (skip.iteration or 0)]
        events.insert(before[-1] + 1 if before else 0, skip)
    return events


def end_of(records: Sequence[Mapping[str, Any]]) -> str:
    """The end of the last start of a run: finished, stopped or failed; empty if none was recorded."""
    end = ""
    for record in sorted(records, key=_recorded_at):
        if record["kind"] == "start":
            end = ""
        elif record["kind"] in _ENDS:
            end = record["kind"]
    return end


def _recorded_at(record: Mapping[str, Any]) -> float:
    return record.get("at") or 0.0
