"""Sections complete themselves, check themselves, and say each thing once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from megatron.config.flags.fields import flag
from megatron.config.flags.section import ConfigSection, bound_problems, build_unchecked, relevant_problems
from megatron.errors import ConfigError


def _half(box: Box) -> int:
    if box.width % 2:
        raise ConfigError(f"--width {box.width} has no half. Use {box.width + 1} or give --half.")
    return box.width // 2


@dataclass(frozen=True)
class Box(ConfigSection):
    """A section with a computed default."""

    width: int = flag(help="its width", at_least=1)
    half: int = flag(help="half of it", computed=_half, follows=("width",), at_least=1)
    is_round: bool = flag(False, "without corners")
    is_square: bool = flag(False, "with corners")

    def complete(self) -> None:
        if self.half == 3:
            self.set_derived("is_round", True)

    def problems(self) -> Iterator[str]:
        if self.is_round and self.is_square:
            yield "--is-round and --is-square contradict each other."


def test_a_default_is_computed_from_other_fields() -> None:
    assert (Box(width=8).half, Box(width=8, half=1).half, Box(width=7, half=2).half) == (4, 1, 2)
    assert Box(width=6).is_round, "completed after the default was computed"


def test_a_default_that_cannot_be_computed_is_an_error_with_the_reason() -> None:
    with pytest.raises(ConfigError, match="--width 7 has no half. Use 8 or give --half") as caught:
        Box(width=7)
    assert len(caught.value.problems) == 1


def test_bounds_and_rules_are_checked_on_creation() -> None:
    assert list(bound_problems(Box(width=2))) == []
    with pytest.raises(ConfigError) as caught:
        Box(width=6, half=0, is_round=True, is_square=True)
    assert [text.split()[0] for text in caught.value.problems] == ["--half", "--is-round"]


def test_an_unchecked_section_reports_its_problems_later() -> None:
    box = build_unchecked(Box, {"width": 7})
    assert relevant_problems([box], {"width"}, set()) == ["--width 7 has no half. Use 8 or give --half."]
    empty = build_unchecked(Box, {})
    assert empty.width == 0
    assert relevant_problems([empty], set(), {"width"}) == [], "nothing is said about what follows from a missing value"
