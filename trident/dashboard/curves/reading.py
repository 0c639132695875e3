"""Reads the curves of a run over a selected axis."""

from __future__ import annotations

import dataclasses
import itertools
import math
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.errors import DataError
from megatron.observe.metrics_file import check_run, read_records, read_steps
from megatron.observe.quantities import short_count

STEPS, SAMPLES, TOKENS, HOURS, FLOPS = AXES = ("steps", "samples", "tokens", "hours", "flops")
AXIS_TITLES: Mapping[str, str] = types.MappingProxyType(
    {
        STEPS: "iteration",
        SAMPLES: "samples",
        TOKENS: "tokens",
        HOURS: "hours of training steps",
        FLOPS: "FLOPs (6 per parameter and token, without embeddings)",
    }
)
LOSS = "lm_loss"
# A moving average of these would show values that were never used.
_EXACT = frozenset({"learning_rate", "global_batch_size", "loss_scale"})

_GROUP_NAMES: Mapping[str, str] = types.MappingProxyType({"valid": "validation"})

_FIELDS: Mapping[str, Callable[[Mapping[str, Any]], float]] = types.MappingProxyType(
    {
        STEPS: lambda record: record["iteration"],
        SAMPLES: lambda record: record["consumed_samples"],
        TOKENS: lambda record: record["consumed_tokens"],
        FLOPS: lambda record: record["gigaflops_without_embeddings"] * 1e9,
    }
)


@dataclass(frozen=True)
class Curve:
    """Finite values over one of `AXES`.

    Attributes:
        name: label in legends.
        metric: the measured metric.
        points: (x, y) in the order of the run.
        run: name of its run.
        group: the evaluated data; empty for training steps.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    metric: str = LOSS
    run: str = ""
    group: str = ""

    @property
    def is_evaluation(self) -> bool:
        return bool(self.group)

    def covers(self, other: Curve) -> bool:
        """True if this curve, drawn later, hides another where both have points, as a resumed run does."""
        theirs = dict(other.points)
        shared = [(y, theirs[x]) for x, y in self.points if x in theirs]
        return len(shared) > 1 and all(math.isclose(one, another, rel_tol=0.01) for one, another in shared)

    def summary(self, axis: str = STEPS) -> str:
        """The first and last value as text."""
        (first, start), (last, end) = self.points[0], self.points[-1]
        unit = "iterations" if axis == STEPS else AXIS_TITLES[axis].partition(" (")[0]
        positions = f"{unit} {position_text(first, axis)} to {position_text(last, axis)}"
        return f"{self.name}: {start:.4g} -> {end:.4g} ({positions})"

    def smoothed(self, ratio: float) -> Curve:
        """The exponential moving average with bias correction; scheduled values, such as the learning rate, are kept.

        Args:
            ratio: the decay; 0 changes nothing.
        """
        if self.metric in _EXACT:
            return self
        total = weight = 0.0
        averages = []
        for x, y in self.points:
            total, weight = ratio * total + (1.0 - ratio) * y, ratio * weight + 1.0 - ratio
            averages.append((x, total / weight))
        return dataclasses.replace(self, points=tuple(averages))


def position_text(x: float, axis: str) -> str:
    """Formats a position on an axis."""
    return f"{x:.0f}" if axis == STEPS else f"{x:.3g}" if axis == HOURS else short_count(x)


def read_curves(path: str | Path, metric: str, axis: str = STEPS, name: str | None = None) -> list[Curve]:
    """Reads the training curve of a run and, for the loss, one curve per evaluation group.

    Args:
        path: a run directory or its metrics file.
        metric: a key of the records of steps.
        axis: one of `AXES`.
        name: the run in legends; default: its folder.

    Raises:
        DataError: the file is missing or unreadable, or has no finite value of this metric.
    """
    check_run(path)
    name = name or (Path(path).resolve().parent.name if Path(path).is_file() else Path(path).resolve().name)
    steps = read_steps(path)
    positions = dict(zip(steps, _positions(list(steps.values()), axis), strict=True))
    points = _finite((positions[step], record.get(metric)) for step, record in steps.items())
    curves = [Curve(name, points, metric, name)]
    if not points:
        raise DataError(f"{path} has no step with a finite {metric}. Train a step first, or choose another --metric.")
    if metric == LOSS:
        groups: dict[str, dict[float, object]] = {}
        for record in read_records(path):
            position = _evaluation_position(record, positions, axis) if record["kind"] == "evaluation" else None
            if position is not None:
                groups.setdefault(str(record["group"]), {})[position] = record["lm_loss"]
        for group, values in groups.items():
            points = _finite(sorted(values.items()))
            curves.append(Curve(f"{name}, {_GROUP_NAMES.get(group, group)}", points, metric, name, group))
    return [curve for curve in curves if curve.points]


def _positions(records: Sequence[Mapping[str, Any]], axis: str) -> list[float]:
    if axis == HOURS:
        return [seconds / 3600 for seconds in itertools.accumulate(item["seconds_per_iteration"] for item in records)]
    return [_FIELDS[axis](record) for record in records]


def _evaluation_position(record: Mapping[str, Any], positions: Mapping[int, float], axis: str) -> float | None:
    """The position of an evaluation; None if it is known only from the record of its step, and that is missing."""
    return _FIELDS[axis](record) if axis in (STEPS, SAMPLES, TOKENS) else positions.get(int(record["iteration"]))


def _finite(points: Iterable[tuple[float, object]]) -> tuple[tuple[float, float], ...]:
    return tuple((x, float(y)) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y))
