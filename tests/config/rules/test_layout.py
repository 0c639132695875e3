"""Legal layouts: found through divisors, the nearest first, and what is said of the others."""

from __future__ import annotations

import re

import pytest

from megatron.config.rules.layout import divisors, layout_problems, nearest_layouts


@pytest.mark.parametrize("number", [1, 2, 12, 13, 36, 360, 4096])
def test_divisors(number: int) -> None:
    assert divisors(number) == [size for size in range(1, number + 1) if number % size == 0]


@pytest.mark.parametrize("world", [1, 6, 12, 48])
def test_all_legal_layouts_are_found(world: int) -> None:
    pairs = [(tp, pp) for tp in range(1, world + 1) for pp in range(1, world + 1)]
    assert sorted(nearest_layouts(world, 1, 1)) == [(tp, pp) for tp, pp in pairs if world % (tp * pp) == 0]
    strict = [(tp, pp) for tp, pp in pairs if world % (tp * pp) == 0 and 12 % tp == 0 and 16 % tp == 0 and pp <= 3]
    assert sorted(nearest_layouts(world, 1, 1, split_sizes=(12, 16), most_stages=3)) == strict


def test_the_nearest_layouts_come_first() -> None:
    assert nearest_layouts(16384, 8, 12)[:4] == [(8, 16), (8, 8), (4, 16), (8, 32)]
    assert nearest_layouts(48, 8, 6)[0] == (8, 6)
    assert nearest_layouts(1, 8, 8) == [(1, 1)]


@pytest.mark.parametrize(
    ("world", "tp", "pp", "words"),
    [
        (4096, 8, 12, "multiple of 96 processes, but this run has 4096. Use 4032 or 4128, .* fits 4096: 8 x 16, 8 x 8"),
        (16384, 16384, 2, r"Use 32768, or .* fits 16384: 8192 x 2, 16384 x 1, .* or 112 others\."),
        (1, 4, 1, r"but this run has 1. Use 4, or .* fits 1: 1 x 1\."),
        (6, 4, 1, r"Use 4 or 8, or .* fits 6: 3 x 1, 6 x 1, 2 x 1"),
    ],
)
def test_a_layout_that_does_not_fill_the_world(world: int, tp: int, pp: int, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        raise ValueError(*layout_problems(world, tp, pp))
    assert list(layout_problems(tp * pp, tp, pp)) == list(layout_problems(tp * pp * 3, tp, pp)) == []


@pytest.mark.parametrize(
    ("world", "words"),
    [
        (6, r"Use 8, or a tensor x pipeline layout that fits 6: 3 x 1, 1 x 1, 1 x 3\."),
        (3, r"Use 8, or 1 per sequence and a tensor x pipeline layout that fits 3: 3 x 1, "),
    ],
)
def test_proposed_layouts_leave_room_for_the_ranks_of_a_sequence(world: int, words: str) -> None:
    (problem,) = layout_problems(world, 4, 1, sequence_size=2)
    assert re.search(words, problem), problem
