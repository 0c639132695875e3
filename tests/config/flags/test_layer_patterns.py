"""Choices that vary over the layers, in upstream's notation."""

from __future__ import annotations

import pytest

from megatron.config.flags.shorthands import read_pattern, shortest_period
from megatron.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "found"),
    [("3", 3), ("[1, 0]", (1, 0)), ("[0]*1+[1]*3", (0, 1, 1, 1)), ("([1]*3+[0]*1)*2", (1, 1, 1, 0, 1, 1, 1, 0))],
)
def test_a_number_or_a_list(text: str, found: object) -> None:
    assert read_pattern("--moe-layer-freq", text, None) == found


@pytest.mark.parametrize(
    "text",
    ["0", "-1", "", "x", "[2]", "[]", "[1]*99999", "[1]*-1", "3*[1]", "[[1]]", "[1]+1", "1.5", "True", "print(1)",
     "[1 for i in range(3)]", "__import__('os')", "(" * 500, "[1]*9**9**9", "1\0"],
)  # fmt: skip
def test_anything_else_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match="--moe-layer-freq .*is not a layer pattern"):
        read_pattern("--moe-layer-freq", text, None)


def test_a_list_has_an_entry_for_each_layer() -> None:
    assert read_pattern("--no-rope-freq", "[0,1]*2", 4) == (0, 1, 0, 1)
    with pytest.raises(ConfigError, match=r"--no-rope-freq \[0,1\] has 2 entries, but --num-layers is 4"):
        read_pattern("--no-rope-freq", "[0,1]", 4)


@pytest.mark.parametrize(
    ("pattern", "shortest"),
    [((1, 1, 1), ()), ((1, 0, 1, 0), (1, 0)), ((0, 0), (0,)), ((1, 0, 1), (1, 0, 1)), ((1, 0, 0, 1, 0, 0), (1, 0, 0))],
)
def test_the_shortest_period(pattern: tuple[int, ...], shortest: tuple[int, ...]) -> None:
    assert shortest_period(pattern) == shortest
