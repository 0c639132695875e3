"""Which layouts go with what: every rule that refuses one is found, and nothing else is."""

from __future__ import annotations

import pytest

from megatron.config import support
from megatron.config.support import AXES, alternatives, problems_of, refusals, words_of
from tests.config.command_lines import words


def test_values_have_names_of_their_own_and_flags_that_are_known() -> None:
    values = [value for axis in AXES.values() for value in axis]
    assert len(values) == len(set(values))
    for axis in AXES.values():
        assert problems_of([*words(), *words_of([next(iter(axis))])]) == ()


def test_as_few_values_as_possible_make_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    few = {name: AXES[name] for name in ("ZeRO", "experts", "compiled blocks")}
    monkeypatch.setattr(support, "AXES", few)
    assert {one.values for one in refusals(words(), most=3)} == {
        ("ZeRO 3", "compiled"),
        ("4 experts", "compiled"),
        ("4 experts on 2 ranks", "compiled"),
        ("4 whole experts on 2 ranks", "compiled"),
    }


def test_a_command_with_other_values_keeps_its_sizes() -> None:
    flags = words("--pipeline-model-parallel-size 4 --bf16", drop="--data-path")
    found = {one.value: one for one in alternatives(flags)}
    assert {one.value for one in found.values() if one.is_given} >= {"bf16", "ZeRO 1", "tensor 1", "all trained"}
    assert not found["float32"].is_given and found["float32"].problems == ()
    (problem,) = found["ZeRO 3"].problems
    assert "--zero-stage 3 cannot be used with --pipeline-model-parallel-size 4" in problem
    assert not any("--data-path" in problem for one in found.values() for problem in one.problems)
