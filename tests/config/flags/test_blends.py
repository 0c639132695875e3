"""Splits, blends and groups, read from text."""

from __future__ import annotations

import pytest

from megatron.config.flags.blends import WeightedPath, read_blend, read_split, read_weighted_group, shown_split
from megatron.errors import ConfigError


def test_a_split_is_normalized() -> None:
    assert read_split("8, 1, 1") == (0.8, 0.1, 0.1) and read_split("3/1") == (0.75, 0.25, 0.0)
    assert shown_split(" 9, 1,0") == "9,1,0"


def test_a_blend_is_pairs_of_weight_and_prefix() -> None:
    assert read_blend((), "--data-path") == () and read_blend(("a",), "--data-path") == ((1.0, "a"),)
    assert read_blend(("2", "a", ".5", "b"), "--data-path") == ((2.0, "a"), (0.5, "b"))
    assert read_blend(("a", "b", "c"), "--data-path") == ((0.0, "a"), (0.0, "b"), (0.0, "c"))  # by size


def test_a_group_has_a_name_and_entries() -> None:
    group = read_weighted_group("MAIN: 0.2 0:0.5 a, 1 0.5:1 b", "--groups")
    assert group.name == "MAIN" and group.entries == (WeightedPath(0.2, 0, 0.5, "a"), WeightedPath(1, 0.5, 1, "b"))


def test_a_path_with_a_nul_character_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"--data-path '1 a\\x00b' contains a NUL character at position \d"):
        read_blend(("1", "a\0b"), "--data-path")
    with pytest.raises(ConfigError, match=r"--train-weighted-split-paths .* contains a NUL character at position \d+"):
        read_weighted_group("A: 1 0:1 a\0", "--train-weighted-split-paths")
