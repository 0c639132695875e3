"""The 64-bit generator of C++, against the number that the standard names."""

from __future__ import annotations

from megatron.data.order.mersenne import mersenne_numbers


def test_the_ten_thousandth_number_is_that_of_the_standard() -> None:
    """ISO C++ [rand.predef]: the 10000th invocation of a default `mt19937_64`, whose seed is 5489."""
    assert int(mersenne_numbers(5489, 10_000)[-1]) == 9981545732273789042


def test_any_number_of_numbers() -> None:
    assert len(mersenne_numbers(1, 0)) == 0
    assert mersenne_numbers(7, 313)[:3].tolist() == mersenne_numbers(7, 3).tolist()
