"""Smoothing against its formula; extremes that survive; the part that is shown."""

from __future__ import annotations

import numpy as np
import pytest

from trident.dashboard.decimation import decimated, smoothed, sorted_points


@pytest.mark.parametrize("weight", [0.0, 0.1, 0.6, 0.9, 0.999])
def test_smoothing_is_the_weighted_mean_of_the_past(weight: float) -> None:
    values = np.random.default_rng(1).normal(size=1500)
    values[[0, 7, 800]] = np.nan, np.inf, np.nan
    found, total, mass = smoothed(values, weight), 0.0, 0.0
    for value, one in zip(values, found, strict=True):
        if not np.isfinite(value):
            assert not np.isfinite(one)
            continue
        total, mass = weight * total + value, weight * mass + 1.0
        assert one == pytest.approx(total / mass, rel=1e-9, abs=1e-12)
    assert smoothed(np.full(4, np.nan), 0.5).shape == (4,) and smoothed(np.empty(0), 0.5).shape == (0,)


def test_every_spike_stays_visible() -> None:
    x = np.arange(1, 100_001, dtype=np.float64)
    values = np.zeros(100_000, np.float32)
    values[12_345], values[77_777] = 9.0, -9.0
    curve = decimated(x, values, values, 300)
    assert len(curve.x) == 300 and curve.extent == (1.0, 100_000.0)
    assert curve.high.max() == 9.0 and curve.low.min() == -9.0
    assert np.count_nonzero(curve.high) == np.count_nonzero(curve.low) == 1
    assert abs(curve.x[np.argmax(curve.high)] - 12_346) <= 100_000 / 300


def test_the_shown_part_reaches_to_the_nearest_points_outside() -> None:
    x = np.arange(0, 1000, 10, dtype=np.float64)
    curve = decimated(x, x, x, 500, (105.0, 195.0))
    assert curve.x.tolist() == list(range(100, 201, 10)) and curve.extent == (0.0, 990.0)
    assert decimated(x, x, x, 500, (2000.0, 3000.0)).x.tolist() == [990.0]
    nothing = decimated(x[:0], x[:0], x[:0], 500, (1.0, 2.0))
    assert nothing.x.size == 0 and nothing.extent == (0.0, 0.0)


def test_a_logarithmic_axis_has_intervals_of_equal_ratio_and_nothing_at_zero() -> None:
    x = np.arange(0, 10_000, dtype=np.float64)
    curve = decimated(x, x, x, 40, is_logarithmic=True)
    ratios = curve.x[20:][1:] / curve.x[20:][:-1]
    assert curve.x[0] == 1.0 and np.allclose(ratios, 10_000 ** (1 / 40), rtol=0.12)
    assert decimated(x[:1], x[:1], x[:1], 40, is_logarithmic=True).x.size == 0


def test_values_that_are_not_finite_leave_gaps_in_the_band_and_none_in_the_line() -> None:
    x, values = np.arange(100.0), np.arange(100.0)
    values[10:40] = np.nan
    values[50] = np.inf
    curve = decimated(x, values, values, 10)
    assert np.isnan(curve.low).nonzero()[0].tolist() == [1, 2, 3]
    assert np.isfinite(curve.line).all() and curve.line[2] == 9.0 and np.nanmax(curve.high) == 99.0


def test_points_without_a_place_are_left_out_and_the_others_put_in_order() -> None:
    x, values = np.array([3.0, np.nan, 1.0, np.inf, 2.0]), np.arange(5.0)
    places, found, same = sorted_points(x, values, values)
    assert places.tolist() == [1.0, 2.0, 3.0] and found.tolist() == [2.0, 4.0, 0.0] == same.tolist()
    steps = np.arange(4)
    assert sorted_points(steps, steps)[1] is steps and sorted_points(steps[:0])[0].size == 0
