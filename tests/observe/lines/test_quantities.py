"""Numbers as a person reads them."""

from __future__ import annotations

import math

import pytest

from megatron.observe.quantities import duration, short_bytes, short_count


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"), (950, "950"), (999.6, "1.0K"), (5_300_000, "5.3M"), (99_940, "99.9K"), (99_960, "100K"),
        (10.5e9, "10.5B"), (175e9, "175B"), (1.2e12, "1.2T"), (1e24, "1000000Qi"),
    ],
)  # fmt: skip
def test_counts(number: float, text: str) -> None:
    assert short_count(number) == text


@pytest.mark.parametrize(("number", "text"), [(12, "12 B"), (312 * 2**20, "312 MiB"), (1.3 * 2**30, "1.3 GiB")])
def test_bytes(number: float, text: str) -> None:
    assert short_bytes(number) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(754.4, "0:12:34"), (3 * 86400 + 5, "3 days, 0:00:05"), (1e15, "more than 10,000 years"), (math.nan, "more than")],
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds).startswith(text)
