"""Reduces curves of any length to a few hundred points, smoothed over all values.

Each interval keeps its lowest and highest value, so that a spike of one step in a million stays visible.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class DecimatedCurve:
    """Points to draw. Shapes: each `[points]`.

    Attributes:
        x: position of the first value of each interval.
        low, high: extremes of the interval; NaN if it has no finite value.
        line: smoothed value at the end of the interval.
        extent: first and last position of the whole curve, not only of the selected range.
    """

    x: np.ndarray
    low: np.ndarray
    high: np.ndarray
    line: np.ndarray
    extent: tuple[float, float]


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """The exponential moving average with bias correction; `weight` is the decay.

    y_i = (Σ_j weight^(i-j) x_j) / (Σ_j weight^(i-j)) over the finite values; the others become NaN.

    Shapes: values `[n]` -> `[n]`.
    """
    if weight <= 0.0:
        return values
    result = np.full(len(values), np.nan, values.dtype)
    is_finite = np.isfinite(values)
    known = values[is_finite].astype(np.float64)
    # Within a block, weight^-j does not overflow.
    block = max(1, min(512, int(200.0 / -np.log10(weight)))) if weight < 1.0 else 512
    powers = weight ** np.arange(1, block + 1)
    averages, total, mass = np.empty(len(known)), 0.0, 0.0
    for start in range(0, len(known), block):
        chunk = known[start : start + block]
        power = powers[: len(chunk)]
        totals = power * (total + np.cumsum(chunk / power))
        masses = power * (mass + np.cumsum(1.0 / power))
        averages[start : start + block] = totals / masses
        total, mass = totals[-1], masses[-1]
    result[is_finite] = averages
    return result


def sorted_points(x: np.ndarray, *rows: np.ndarray) -> tuple[np.ndarray, ...]:
    """Sorts points by position, without those whose position is not finite.

    Shapes: x and rows each `[n]` -> `[m]`.
    """
    is_known = np.isfinite(x)
    points = (x, *rows) if is_known.all() else tuple(one[is_known] for one in (x, *rows))
    if np.any(points[0][1:] < points[0][:-1]):
        order = np.argsort(points[0], kind="stable")
        points = tuple(one[order] for one in points)
    return points


def decimated(
    x: np.ndarray,
    values: np.ndarray,
    line: np.ndarray,
    points: int,
    between: tuple[float, float] | None = None,
    *,
    is_logarithmic: bool = False,
) -> DecimatedCurve:
    """Reduces a curve to about `points` intervals of equal width on the screen.

    Shapes: x, values and line `[n]`, x finite and ascending: see `sorted_points`.

    Args:
        line: `smoothed` values.
        between: the visible range of the axis; includes the nearest point on either side. None for all.
        is_logarithmic: use a logarithmic axis, without positions <= 0.
    """
    start, end = 0, len(x)
    if is_logarithmic:
        start = int(np.searchsorted(x, 0.0, side="right"))
    extent = (float(x[start]), float(x[end - 1])) if start < end else (0.0, 0.0)
    if between is not None and start < end:
        first = max(start, int(np.searchsorted(x, between[0], side="left")) - 1)
        end = min(end, int(np.searchsorted(x, between[1], side="right")) + 1)
        start = min(first, end)
    x, values, line = x[start:end], values[start:end], line[start:end]
    if len(x) <= points:
        return DecimatedCurve(x.astype(np.float64), values, values, line, extent)
    spaced = np.geomspace if is_logarithmic else np.linspace
    edges = spaced(float(x[0]), float(x[-1]), points + 1)
    starts = np.unique(np.searchsorted(x, edges[:-1], side="left"))
    starts = starts[starts < len(x)]
    ends = np.append(starts[1:], len(x)) - 1
    if not np.isfinite(values).all():
        values = np.where(np.isfinite(values), values, np.nan)
    shown = line[ends] if np.isfinite(line[ends]).all() else _forward_filled(line)[ends]
    low, high = np.fmin.reduceat(values, starts), np.fmax.reduceat(values, starts)
    return DecimatedCurve(x[starts].astype(np.float64), low, high, shown, extent)


def _forward_filled(values: np.ndarray) -> np.ndarray:
    rows = np.where(np.isfinite(values), np.arange(len(values)), -1)
    np.maximum.accumulate(rows, out=rows)
    return np.where(rows >= 0, values[np.maximum(rows, 0)], np.nan)
