"""Metrics: named figures of training steps, as objectives, the engine and callbacks return them.

A step is a mapping of metrics by name. `megatron/observe/names.py` has their names in each destination.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple


class Reduction(enum.Enum):
    """The reduction of a log interval's steps to one value; an update is applied unless its step is skipped."""

    MEAN = "the mean of the values of the steps whose update was applied"
    WEIGHTED_MEAN = "the sums of these steps over their weights"
    RATE = "the sums of all steps over their weights"
    TOTAL = "the sum over all steps"
    LAST = "the value of the last step"


class Metric(NamedTuple):
    """A named value of a step: `sum / weight`.

    Attributes:
        name: as in `metrics.jsonl`; `group/name` for members of a group, such as the losses of data sources.
        sum: a number, or with `Reduction.LAST` any JSON value.
        weight: divisor of the sum; if it is 0, there is no value.
        reduction: the reduction over the steps of a log interval.
    """

    name: str
    sum: Any
    weight: float = 1
    reduction: Reduction = Reduction.MEAN

    @property
    def value(self) -> Any:
        """The value; None without weight."""
        return self.sum if self.weight == 1 else self.sum / self.weight if self.weight else None


class StepMetrics(dict[str, Metric]):
    """The metrics of a step or of a log interval, by name."""

    def value(self, name: str) -> Any:
        """The value of a metric; None if it is missing or has no weight."""
        return self[name].value if name in self else None

    def add(self, *metrics: Metric) -> None:
        """Adds metrics; they replace metrics of the same name."""
        self.update((metric.name, metric) for metric in metrics)


@dataclass(frozen=True)
class MetricSpec:
    """The layout of a metric that is summed over micro-batches and ranks: the sums, then their weights.

    Attributes:
        labels: the names in the group, one for each sum; a single metric has one empty label.
        reduction: as in `Metric`.
    """

    labels: Sequence[str] = ("",)
    reduction: Reduction = Reduction.MEAN

    @property
    def size(self) -> int:
        return 2 * len(self.labels)

    def metrics(self, name: str, sums: Sequence[float]) -> Iterator[Metric]:
        """The metrics of a step."""
        count = len(self.labels)
        for label, total, weight in zip(self.labels, sums[:count], sums[count:], strict=True):
            yield Metric(f"{name}/{label}" if label else name, total, weight, self.reduction)


def metrics_of(values: Mapping[str, Any], reduction: Reduction, weight: float = 1) -> Iterator[Metric]:
    """Metrics with the same weight and reduction; skips values that are None."""
    return (Metric(name, value, weight, reduction) for name, value in values.items() if value is not None)


def combined(parts: Sequence[Metric]) -> Metric:
    """Reduces one metric over several steps."""
    last = parts[-1]
    if last.reduction is Reduction.LAST:
        return last
    if last.reduction is Reduction.MEAN:
        values = [value for part in parts if (value := part.value) is not None]
        return last._replace(sum=sum(values), weight=len(values))
    weight = 1 if last.reduction is Reduction.TOTAL else math.fsum(part.weight for part in parts)
    return last._replace(sum=sum(part.sum for part in parts), weight=weight)
