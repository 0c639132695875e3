"""The steps of a run as columns of numbers, in the order of training.

A run that is killed and resumed repeats the steps after its checkpoint: the first repeated step removes the earlier
records of this and all later steps.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

AXES = ("steps", "tokens", "hours")
_FEWEST_ROWS = 256
_MOST_CURVES = 2_000
_NOT_CURVES = frozenset({"iteration", "train_iterations", "consumed_tokens"})
_LISTS = frozenset({"weight_norms", "gradient_norms"})  # per layer: too many curves
_PLAIN = frozenset({int, float, type(None)})


@dataclass
class Evaluations:
    """The values of an evaluation curve by step: (consumed tokens, value)."""

    values: dict[int, tuple[float, float]] = field(default_factory=dict)

    def truncate(self, iteration: int) -> None:
        for step in [step for step in self.values if step >= iteration]:
            del self.values[step]


class MetricsTable:
    """The columns of one run; missing values are NaN."""

    def __init__(self) -> None:
        self.count = 0
        self.repeated_steps = 0
        self.evaluations: dict[str, Evaluations] = {}
        self._columns: dict[str, np.ndarray] = {}
        self._finite: dict[str, None] = {}
        self._axes = {
            "steps": np.empty(_FEWEST_ROWS, np.int64),
            "tokens": np.empty(_FEWEST_ROWS, np.float64),
            "hours": np.empty(_FEWEST_ROWS, np.float64),
        }

    def add(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds the steps and evaluations among records, in the order they were written.

        Args:
            records: see `records.metric_records`.
        """
        steps: list[Mapping[str, Any]] = []
        for record in records:
            kind = record.get("kind")
            if kind == "step":
                steps.append(record)
            elif kind in ("evaluation", "task"):
                self._add_steps(steps)
                steps = []
                self._add_evaluation(record)
        self._add_steps(steps)

    def metrics(self) -> list[str]:
        """The names of all curves with a finite value, in order of appearance."""
        evaluated = (name.partition("|")[0] for name, one in self.evaluations.items() if one.values)
        return list(dict.fromkeys([*self._finite, *evaluated]))

    def column(self, name: str) -> np.ndarray:
        """The values of a metric. Shape: `[steps]`, or empty if no step has it."""
        column = self._columns.get(name)
        return np.empty(0, np.float32) if column is None else column[: self.count]

    def axis(self, name: str) -> np.ndarray:
        """The positions of all steps on an axis of `AXES`; NaN if unknown. Shape: `[steps]`.

        Hours are training time, without evaluations, saves and repeated steps.
        """
        return self._axes[name][: self.count]

    def last(self, name: str) -> float | None:
        """The last value of a metric; None if missing or not finite."""
        column = self.column(name)
        return float(column[-1]) if len(column) and np.isfinite(column[-1]) else None

    def evaluation_curves(self, metric: str, axis: str) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        """The evaluations of a metric by group: positions on an axis, and values."""
        curves = {}
        for name, one in self.evaluations.items():
            evaluated, _, group = name.partition("|")
            if evaluated != metric or not one.values:
                continue
            steps = np.array(sorted(one.values), np.int64)
            values = np.array([one.values[step] for step in steps.tolist()], np.float64)
            curves[group] = self._positions(steps, values[:, 0], axis), values[:, 1]
        return curves

    def _positions(self, steps: np.ndarray, tokens: np.ndarray, axis: str) -> np.ndarray:
        if axis != "hours":
            return steps.astype(np.float64) if axis == "steps" else tokens
        rows = np.searchsorted(self.axis("steps"), steps, side="right") - 1
        hours = self.axis("hours")
        return np.where(rows >= 0, hours[np.maximum(rows, 0)], 0.0) if len(hours) else np.zeros(len(steps))

    def _add_steps(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Adds records of steps; a step that goes back first removes the later ones."""
        if not records:
            return
        steps = np.array([record["iteration"] for record in records], np.int64)
        starts = [0, *(np.flatnonzero(np.diff(steps) <= 0) + 1).tolist(), len(records)]
        for start, end in itertools.pairwise(starts):
            self._truncate(int(steps[start]))
            self._append(records[start:end], steps[start:end])

    def _truncate(self, iteration: int) -> None:
        kept = int(np.searchsorted(self.axis("steps"), iteration))
        if kept < self.count:
            self.repeated_steps += self.count - kept
            self.count = kept
        for one in self.evaluations.values():
            one.truncate(iteration)

    def _append(self, records: Sequence[Mapping[str, Any]], steps: np.ndarray) -> None:
        start, end = self.count, self.count + len(records)
        self._reserve(end)
        self._axes["steps"][start:end] = steps
        self._axes["tokens"][start:end] = _numbers(records, "consumed_tokens", np.float64)
        seconds = np.nan_to_num(_numbers(records, "seconds_per_iteration", np.float64))
        before = self._axes["hours"][start - 1] if start else 0.0
        self._axes["hours"][start:end] = before + np.cumsum(seconds) / 3600.0
        has_groups = any(isinstance(value, dict) for record in (records[0], records[-1]) for value in record.values())
        flat = [_flattened(record) for record in records] if has_groups else records
        new = [name for name in dict.fromkeys([*flat[0], *flat[-1]]) if name not in self._columns]
        for name in new:
            is_curve = name not in _NOT_CURVES and len(self._columns) < _MOST_CURVES
            if is_curve and (_is_number(flat[0].get(name)) or _is_number(flat[-1].get(name))):
                self._columns[name] = np.full(len(self._axes["steps"]), np.nan, np.float32)
        for name, column in self._columns.items():
            column[start:end] = _numbers(flat, name, np.float32)
            if name not in self._finite and np.isfinite(column[start:end]).any():
                self._finite[name] = None
        self.count = end

    def _reserve(self, rows: int) -> None:
        size = len(self._axes["steps"])
        if rows <= size:
            return
        size = max(rows, size + size // 2)
        for columns in (self._axes, self._columns):
            for name, column in columns.items():
                grown = (
                    np.full(size, np.nan, column.dtype) if column.dtype.kind == "f" else np.zeros(size, column.dtype)
                )
                grown[: self.count] = column[: self.count]
                columns[name] = grown

    def _add_evaluation(self, record: Mapping[str, Any]) -> None:
        iteration, tokens = record["iteration"], _number(record.get("consumed_tokens"))
        if record["kind"] == "evaluation":
            group = record.get("group", "")
            values = {f"lm_loss|{group}": record.get("lm_loss")}
        else:
            task = record.get("task", "")
            values = {f"{task}/{name}|{task}": value for name, value in record.get("figures", {}).items()}
        for name, value in values.items():
            if _is_number(value) and (name in self.evaluations or len(self.evaluations) < _MOST_CURVES):
                self.evaluations.setdefault(name, Evaluations()).values[iteration] = (tokens, _number(value))


def _flattened(record: Mapping[str, Any]) -> dict[str, Any]:
    """Merges the numbers in groups of metrics into the record."""
    groups = {name: value for name, value in record.items() if isinstance(value, dict)}
    flat = {name: value for name, value in record.items() if name not in groups}
    for group, members in groups.items():
        for name, value in members.items() if group not in _LISTS else ():
            if isinstance(value, dict) and "lm_loss" in value:
                flat[f"lm_loss of {name}"] = value["lm_loss"]
            elif isinstance(value, dict) and name == "layers":
                flat.update(_layer_metrics(value))
            elif _is_number(value):
                flat[name] = value
    return flat


def _layer_metrics(layers: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """The metrics of each MoE layer and its experts, by the name of their curve."""
    for index, layer in layers.items():
        for name, value in layer.items() if isinstance(layer, dict) else ():
            if _is_number(value):
                yield f"{name} of layer {index}", value
            elif isinstance(value, list):
                yield from ((f"{name} of layer {index}, expert {number}", entry) for number, entry in enumerate(value))


def _numbers(records: Sequence[Mapping[str, Any]], name: str, kind: type) -> np.ndarray:
    values: list[Any] = [record.get(name) for record in records]
    if not _PLAIN.issuperset(map(type, values)):
        values = [_number(value) for value in values]
    with np.errstate(over="ignore"):
        return np.array(values, kind)


def _is_number(value: Any) -> bool:
    return (isinstance(value, int | float) and not isinstance(value, bool)) or value in ("NaN", "Infinity", "-Infinity")


def _number(value: Any) -> float:
    return float(value) if _is_number(value) else float("nan")
