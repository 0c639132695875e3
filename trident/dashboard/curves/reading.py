"""Curves of a run, over the axis that is asked for."""

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

_WORDS: Mapping[str, str] = types.MappingProxyType({"valid": "validation"})

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
        name: what a legend calls it.
        metric: what is measured.
        points: (x, y) in the order of the run.
        run: the run it belongs to.
        group: the data of the evaluations in which it was measured; empty for what was measured in training steps.
    """

    name: str
    points: tuple[tuple[float, float], ...]
    metric: str = LOSS
    run: str = ""
    group: str = ""

    @property
    def is_evaluation(self) -> bool:
        """Whether it was measured in evaluations, not in every step."""
        return bool(self.group)

    def covers(self, other: Curve) -> bool:
        """Whether this curve, drawn over another one, would hide it where both are, as a resumed run's curve does."""
        theirs = dict(other.points)
        shared = [(y, theirs[x]) for x, y in self.points if x in theirs]
        return len(shared) > 1 and all(math.isclose(one, another, rel_tol=0.01) for one, another in shared)

    def summary(self, axis: str = STEPS) -> str:
        """The first and last value as text."""
        (first, start), (last, end) = self.points[0], self.points[-1]
        where = "iterations" if axis == STEPS else AXIS_TITLES[axis].partition(" (")[0]
        return (
            f"{self.name}: {start:.4g} -> {end:.4g} ({where} {shown_place(first, axis)} to {shown_place(last, axis)})"
        )

    def smoothed(self, ratio: float) -> Curve:
        """The exponential moving average, without a bias to its start.

        What is set, not measured, such as the learning rate, stays as it is.

        Args:
            ratio: how much of the average each new value keeps; 0 changes nothing.
        """
        if self.metric in _EXACT:
            return self
        total = weight = 0.0
        averages = []
        for x, y in self.points:
            total, weight = ratio * total + (1.0 - ratio) * y, ratio * weight + 1.0 - ratio
            averages.append((x, total / weight))
        return dataclasses.replace(self, points=tuple(averages))


def shown_place(x: float, axis: str) -> str:
    """A place on an axis as text."""
    return f"{x:.0f}" if axis == STEPS else f"{x:.3g}" if axis == HOURS else short_count(x)


def read_curves(path: str | Path, metric: str, axis: str = STEPS, name: str | None = None) -> list[Curve]:
    """The training curve of a run and, for the loss, one curve per evaluated data group.

    Args:
        path: a run directory or its metrics file.
        metric: a key of the records of steps.
        axis: one of `AXES`.
        name: the run in legends; its folder if left out.

    Raises:
        DataError: the file is missing or cannot be read, or holds no finite value of this metric.
    """
    check_run(path)
    name = name or (Path(path).resolve().parent.name if Path(path).is_file() else Path(path).resolve().name)
    steps = read_steps(path)
    places = dict(zip(steps, _places(list(steps.values()), axis), strict=True))
    curves = [Curve(name, _finite((places[step], record.get(metric)) for step, record in steps.items()), metric, name)]
    if not curves[0].points:
        raise DataError(f"{path} holds no step with a finite {metric}. Train a step first, or choose another --metric.")
    if metric == LOSS:
        groups: dict[str, dict[float, object]] = {}
        for record in read_records(path):
            place = _evaluation_place(record, places, axis) if record["kind"] == "evaluation" else None
            if place is not None:
                groups.setdefault(str(record["group"]), {})[place] = record["lm_loss"]
        for group, values in groups.items():
            points = _finite(sorted(values.items()))
            curves.append(Curve(f"{name}, {_WORDS.get(group, group)}", points, metric, name, group))
    return [curve for curve in curves if curve.points]


def _places(records: Sequence[Mapping[str, Any]], axis: str) -> list[float]:
    if axis == HOURS:
        return [seconds / 3600 for seconds in itertools.accumulate(item["seconds_per_iteration"] for item in records)]
    return [_FIELDS[axis](record) for record in records]


def _evaluation_place(record: Mapping[str, Any], places: Mapping[int, float], axis: str) -> float | None:
    """The position of an evaluation; None where only its step could say, which is not recorded."""
    return _FIELDS[axis](record) if axis in (STEPS, SAMPLES, TOKENS) else places.get(int(record["iteration"]))


def _finite(points: Iterable[tuple[float, object]]) -> tuple[tuple[float, float], ...]:
    return tuple((x, float(y)) for x, y in points if isinstance(y, (int, float)) and math.isfinite(y))
