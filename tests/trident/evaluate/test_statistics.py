"""Means with their standard errors, against values computed by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from trident.evaluate.statistics import Estimate, exponential, mean, ratio, scaled


def test_a_mean_and_its_error() -> None:
    found = mean([1.0, 0.0, 1.0, 1.0])
    assert found.value == 0.75
    assert found.error == pytest.approx(math.sqrt(0.75 * 0.25 / 3))  # p (1 - p) / (n - 1)


def test_a_single_item_has_no_error() -> None:
    assert mean([0.5]) == Estimate(0.5, None)
    assert ratio([6.0], [3.0]) == Estimate(2.0, None)
    assert exponential(Estimate(0.0, None)) == Estimate(1.0, None)


def test_a_ratio_weighs_items_by_their_size() -> None:
    found = ratio([2.0, 9.0], [1.0, 3.0])
    assert found.value == 11 / 4
    residuals = (2 - 11 / 4) ** 2 + (9 - 33 / 4) ** 2
    assert found.error == pytest.approx(math.sqrt(residuals * 2) / 4)


def test_the_error_of_a_ratio_is_that_of_a_mean_for_items_of_one_size() -> None:
    values = [0.5, 2.0, 1.25, 4.0]
    assert ratio([3 * value for value in values], [3.0] * 4).error == pytest.approx(mean(values).error)


def test_the_error_of_a_ratio_is_what_drawing_again_gives() -> None:
    drawn = np.random.default_rng(3)
    sizes = drawn.integers(5, 40, 400).astype(float)
    values = sizes * drawn.normal(2.0, 0.5, 400)
    again = []
    for _ in range(600):
        chosen = drawn.integers(0, 400, 400)
        again.append(values[chosen].sum() / sizes[chosen].sum())
    assert ratio(values.tolist(), sizes.tolist()).error == pytest.approx(np.std(again), rel=0.15)


def test_a_perplexity_is_the_exponential_of_a_loss() -> None:
    found = exponential(Estimate(2.0, 0.1), 0.5)
    assert found.value == pytest.approx(math.e)
    assert found.error == pytest.approx(math.e * 0.5 * 0.1)
    assert scaled(Estimate(2.0, 0.1), 3.0) == Estimate(6.0, pytest.approx(0.3))


def test_a_huge_loss_overflows_nothing() -> None:
    assert math.isfinite(exponential(Estimate(1e6, None)).value)
