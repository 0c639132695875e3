"""Which guards contradict each other."""

from __future__ import annotations

import pytest

from megatron.config.sections.safety import SafetyConfig
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("texts", "ranges"),
    [
        ((), ()),
        (("3-5",), ((3, 5),)),
        (("10-11", "3-5"), ((3, 5), (10, 11))),
        (("3-5", "5-8"), ((3, 8),)),
        (("3-9", "4-5"), ((3, 9),)),
        (("3-5", "6-8"), ((3, 5), (6, 8))),
        (("7-7", "7-7"), ((7, 7),)),
    ],
)
def test_ranges_are_sorted_and_merged_where_they_overlap(texts: tuple[str, ...], ranges: tuple[object, ...]) -> None:
    assert SafetyConfig(skip_train_iteration_range=texts).skip_ranges == ranges


def test_a_range_that_ends_before_it_begins_is_rejected() -> None:
    with pytest.raises(ConfigError, match="--skip-train-iteration-range 5-2 is not a range of steps"):
        SafetyConfig(skip_train_iteration_range=("5-2",))
