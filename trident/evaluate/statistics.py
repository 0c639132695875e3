"""Means with standard errors.

Items are treated as independent draws, so an error estimates the variation over samples of the same size. The error of
a single item is None.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

_LARGEST_EXPONENT = 700.0  # a larger one overflows a double


@dataclass(frozen=True)
class Estimate:
    """A value and its standard error; None if that cannot be estimated."""

    value: float
    error: float | None


def mean(values: Sequence[float]) -> Estimate:
    """The mean of the items; of 0 and 1, the share of ones.

    Source: sample standard deviation over the root of the count, as in EleutherAI/lm-evaluation-harness
    `lm_eval/api/metrics.py` (`mean_stderr`).
    """
    count = len(values)
    center = math.fsum(values) / count
    if count < 2:
        return Estimate(center, None)
    variance = math.fsum((value - center) ** 2 for value in values) / (count - 1)
    return Estimate(center, math.sqrt(variance / count))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """The sum of the numerators over the sum of the denominators, such as nats per token with documents as items.

    Source: Cochran, "Sampling Techniques", 3rd edition, 1977, section 2.11 (variance of a ratio, linearised).
    """
    count, total = len(numerators), math.fsum(denominators)
    center = math.fsum(numerators) / total
    if count < 2:
        return Estimate(center, None)
    pairs = zip(numerators, denominators, strict=True)
    residuals = math.fsum((above - center * below) ** 2 for above, below in pairs)
    return Estimate(center, math.sqrt(residuals * count / (count - 1)) / total)


def exponential(estimate: Estimate, factor: float = 1.0) -> Estimate:
    """exp(factor x value), with the error of the delta method: a perplexity from a loss."""
    value = math.exp(min(factor * estimate.value, _LARGEST_EXPONENT))
    return Estimate(value, None if estimate.error is None else value * factor * estimate.error)


def scaled(estimate: Estimate, factor: float) -> Estimate:
    """factor x value, with its error."""
    return Estimate(factor * estimate.value, None if estimate.error is None else factor * estimate.error)
