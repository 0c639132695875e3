"""Ranges of `--split`: upstream's way of rounding."""

import pytest
from hypothesis import given, strategies

from megatron.config.flags.blends import read_split
from megatron.data.build import fraction_range, split_boundaries


@pytest.mark.parametrize(
    ("split", "size", "bounds"),
    [
        ("949,50,1", 10, (0, 10, 10, 10)),
        ("949,50,1", 1000, (0, 949, 999, 1000)),
        ("949,50,1", 12345, (0, 11716, 12333, 12345)),
        ("80,10,10", 7, (0, 5, 6, 7)),
        ("80,10,10", 1001, (0, 801, 901, 1001)),
    ],
)
def test_golden(split, size, bounds):
    assert split_boundaries(read_split(split), size) == bounds


@given(strategies.tuples(*[strategies.integers(0, 1000)] * 3).filter(any), strategies.integers(0, 5000))
def test_ranges_cover_the_file_once(parts, size):
    bounds = split_boundaries(tuple(part / sum(parts) for part in parts), size)
    assert bounds[0] == 0 and bounds[3] == size and list(bounds) == sorted(bounds)


def test_fractions_round_half_to_even():
    assert fraction_range(0.05, 0.15, 10) == (0, 2) and fraction_range(0, 1, 7) == (0, 7)
