"""Significance of the difference between two checkpoints on the same items.

Results are paired by item, which removes the variance of items that are easy or hard for both. Binary metrics are
tested exactly, by the items that only one checkpoint answered correctly; all others by random sign changes. The
interval of a difference comes from bootstrap resampling of items. All draws depend only on the seed.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megatron.errors import DataError, printable

LOWER_IS_BETTER = frozenset({"loss"})
_DRAWN_AT_ONCE = 1 << 22  # values, 32 MiB
_NOT_METRICS = ("item", "predicted", "nats", "tokens")
_ROUNDING = 1e-12


@dataclass(frozen=True)
class Resampling:
    """The settings of intervals and tests.

    Args:
        draws: number of resamples of the items, and of random signs.
        confidence: share of the resamples in the interval.
    """

    draws: int = 10_000
    confidence: float = 0.95
    seed: int = 1234


@dataclass(frozen=True)
class MetricDifference:
    """A metric of two checkpoints on the same items.

    Attributes:
        first, second: the values of the metric.
        low, high: the interval of the difference, second minus first.
        p_value: probability of a difference at least as large, in either direction, if the two were equally good.
        adjusted_p_value: the same, corrected for the number of metrics that are compared at once.
        test: "McNemar" or "signs".
        items: number of items.
        only_first, only_second: number of items that only one of the two answered correctly, for a binary metric;
            otherwise of items that it answered better.
    """

    task: str
    metric: str
    first: float
    second: float
    low: float
    high: float
    p_value: float
    test: str
    items: int
    only_first: int
    only_second: int
    adjusted_p_value: float = 1.0

    @property
    def difference(self) -> float:
        """Second minus first."""
        return self.second - self.first

    def verdict(self, level: float) -> str:
        """The conclusion at a significance level: one of the two is better, or no difference is shown."""
        if self.adjusted_p_value > level or self.difference == 0:
            return "no difference shown"
        return "B is better" if (self.difference < 0) == (self.metric in LOWER_IS_BETTER) else "A is better"


def compare_results(
    first: Mapping[str, Any], second: Mapping[str, Any], resampling: Resampling = Resampling()
) -> list[MetricDifference]:
    """Compares the tasks that two files of results have in common, in the order of the first.

    Args:
        first, second: results of `read_results`.

    Raises:
        DataError: no common task, or a task that was run on different items.
    """
    others = {_name(task): task for task in _tasks(second)}
    pairs = [(task, others[_name(task)]) for task in _tasks(first) if _name(task) in others]
    if not pairs:
        names = " and ".join(", ".join(map(_name, _tasks(one))) or "none" for one in (first, second))
        raise DataError(f"The two results have no task in common (tasks with results: {names}).")
    differences = [difference for one, other in pairs for difference in _compared(one, other, resampling)]
    adjusted = holm([difference.p_value for difference in differences])
    return [
        replace(difference, adjusted_p_value=value) for difference, value in zip(differences, adjusted, strict=True)
    ]


def mcnemar(only_first: int, only_second: int) -> float:
    """The exact two-sided p-value of two kinds of disagreement that are equally probable.

    Source: McNemar, "Note on the sampling error of the difference between correlated proportions", 1947; in its exact,
    binomial form.
    """
    count, fewer = only_first + only_second, min(only_first, only_second)
    tail = sum(math.comb(count, wins) for wins in range(fewer + 1))
    return min(1.0, 2 * tail / 2**count)


def sign_test(differences: np.ndarray, resampling: Resampling) -> float:
    """The p-value of a sum of paired differences, whose signs are random if the two are equally good.

    Shapes: differences `[n]`.

    Source: Noreen, "Computer-intensive methods for testing hypotheses", 1989, section 2.2 (approximate randomization,
    the observed outcome counted among the draws).
    """
    generator = np.random.default_rng([resampling.seed, 1])
    observed = abs(math.fsum(differences))
    limit = observed - _ROUNDING * float(np.abs(differences).sum())
    as_large = 0
    for count in _chunks(resampling.draws, len(differences)):
        signs = generator.integers(0, 2, (count, len(differences)), dtype=np.int8) * np.int8(2) - np.int8(1)
        as_large += int((np.abs(signs @ differences) >= limit).sum())
    return (1 + as_large) / (1 + resampling.draws)


def bootstrap_interval(differences: np.ndarray, weights: np.ndarray, resampling: Resampling) -> tuple[float, float]:
    """The percentile interval of sum(differences) / sum(weights) under resampling of the items.

    Shapes: differences and weights `[n]`.

    Source: Efron and Tibshirani, "An introduction to the bootstrap", 1993, section 13.3.
    """
    generator = np.random.default_rng([resampling.seed, 2])
    values = []
    for count in _chunks(resampling.draws, len(differences)):
        drawn = generator.integers(0, len(differences), (count, len(differences)))
        values.append(differences[drawn].sum(axis=1) / weights[drawn].sum(axis=1))
    outside = (1 - resampling.confidence) / 2
    low, high = np.quantile(np.concatenate(values), [outside, 1 - outside])
    return float(low), float(high)


def holm(p_values: Sequence[float]) -> list[float]:
    """P-values corrected for their number, which keeps the family-wise error rate below the level.

    Source: Holm, "A simple sequentially rejective multiple test procedure", 1979.
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda index: p_values[index])):
        largest = max(largest, min(1.0, p_values[index] * (len(p_values) - rank)))
        adjusted[index] = largest
    return adjusted


def comparison_lines(differences: Sequence[MetricDifference], resampling: Resampling) -> list[str]:
    """The comparison as a table."""
    percent = f"{100 * resampling.confidence:g} % interval"
    rows = [("task", "metric", "A", "B", "B - A", percent, "A/B only", "p", "p (Holm)", "")]
    for one in differences:
        rows.append((
            one.task, one.metric, f"{one.first:.4f}", f"{one.second:.4f}", f"{one.difference:+.4f}",
            f"[{one.low:+.4f}, {one.high:+.4f}]", f"{one.only_first}/{one.only_second} of {one.items}",
            f"{one.p_value:.4f}", f"{one.adjusted_p_value:.4f}", one.verdict(1 - resampling.confidence),
        ))  # fmt: skip
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _tasks(results: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The tasks with items, so without failed ones."""
    return [
        task
        for task in results.get("tasks", [])
        if isinstance(task, Mapping)
        and task.get("per_item")
        and all(isinstance(item, Mapping) for item in task["per_item"])
    ]


def _name(task: Mapping[str, Any]) -> str:
    return printable(str(task.get("name")), quoted=False)


def _compared(
    first: Mapping[str, Any], second: Mapping[str, Any], resampling: Resampling
) -> Iterator[MetricDifference]:
    name, pair = _name(first), (first["per_item"], second["per_item"])
    _check_same_items(name, *pair)
    if all("nats" in item and "tokens" in item for items in pair for item in items):
        tokens = [_numbers(name, items, "tokens") for items in pair]
        if not np.array_equal(tokens[0], tokens[1]):
            raise DataError(
                f"The items of task {name} have different numbers of tokens in the two results, so their "
                "losses per token cannot be compared. Compare checkpoints with the same tokenizer."
            )
        nats = [_numbers(name, items, "nats") for items in pair]
        yield _difference(name, "loss", nats[0], nats[1], tokens[0], resampling)
    for metric in pair[0][0]:
        if metric not in _NOT_METRICS and metric in pair[1][0]:
            values = [_numbers(name, items, metric) for items in pair]
            yield _difference(name, metric, values[0], values[1], np.ones(len(values[0])), resampling)


def _check_same_items(name: str, first: Sequence[Any], second: Sequence[Any]) -> None:
    """Checks that both results have the same items in the same order, ignoring the folders of files."""
    names = [[str(item.get("item", "")).rpartition("/")[2] for item in items] for items in (first, second)]
    if len(first) != len(second):
        raise DataError(
            f"The task {name} has {len(first)} items in one result and {len(second)} in the other. Run both "
            "with the same data and the same --limit."
        )
    for one, other in zip(*names, strict=True):
        if one != other:
            raise DataError(
                f"The task {name} has the item {printable(one)} in one result, and in its position the other has "
                f"{printable(other)}. Run both on the same data."
            )


def _numbers(name: str, items: Sequence[Mapping[str, Any]], key: str) -> np.ndarray:
    """A value of each item. Shapes: `[n]` float64."""
    for item in items:
        value = item.get(key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise DataError(
                f"The item {printable(item.get('item'))} of task {name} has {printable(value)} as {key}, "
                "which is not a finite number and cannot be compared."
            )
    return np.array([float(item[key]) for item in items])


def _difference(
    task: str, metric: str, first: np.ndarray, second: np.ndarray, weights: np.ndarray, resampling: Resampling
) -> MetricDifference:
    """Compares the values of one metric. Shapes: first, second and weights `[n]`."""
    gain, total = second - first, math.fsum(weights)
    is_binary = bool(np.isin(np.concatenate([first, second]), (0.0, 1.0)).all())
    favours_second = gain < 0 if metric in LOWER_IS_BETTER else gain > 0
    only_second = int(favours_second.sum())
    only_first = int((gain != 0).sum()) - only_second
    low, high = bootstrap_interval(gain, weights, resampling)
    return MetricDifference(
        task=task,
        metric=metric,
        first=math.fsum(first) / total,
        second=math.fsum(second) / total,
        low=low,
        high=high,
        p_value=mcnemar(only_first, only_second) if is_binary else sign_test(gain, resampling),
        test="McNemar" if is_binary else "signs",
        items=len(gain),
        only_first=only_first,
        only_second=only_second,
    )


def _chunks(draws: int, items: int) -> Iterator[int]:
    """Splits the draws into chunks of bounded memory."""
    most = max(1, _DRAWN_AT_ONCE // max(1, items))
    for first in range(0, draws, most):
        yield min(most, draws - first)
