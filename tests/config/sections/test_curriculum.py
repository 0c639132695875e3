"""A curriculum: DeepSpeed's lengths and where they change; what its flags need, and what they exclude."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.config import OptimConfig
from tests.train.samples import optim_config


def growing(**changes: Any) -> OptimConfig:
    """From 8 tokens to 64, in multiples of 8, over 100 steps."""
    fields = {"curriculum_min_length": 8, "curriculum_max_length": 64, "curriculum_steps": 100, "tokens_per_sample": 64}
    return optim_config(**{"curriculum_learning": True, **fields, **changes})


def as_deepspeed(optim: OptimConfig, step: int) -> int:
    """The difficulty of a step as DeepSpeed's scheduler of fixed_root computes it; fixed_linear has degree 1."""
    degree = optim.curriculum_root_degree if optim.curriculum_schedule == "fixed_root" else 1
    low, high = optim.curriculum_min_length, optim.curriculum_max_length
    grown = math.floor((step / optim.curriculum_steps) ** (1.0 / degree) * (high - low) + low)
    grown -= grown % optim.curriculum_length_step
    return min(grown, high)


def test_lengths_computed_by_hand() -> None:
    optim = growing()  # 0.56 tokens a step
    lengths = {1: 8, 14: 8, 15: 16, 28: 16, 29: 24, 50: 32, 99: 56, 100: 64, 10**9: 64}
    assert {step: optim.length_of_step(step) for step in lengths} == lengths
    root = growing(curriculum_schedule="fixed_root", curriculum_root_degree=2)  # half of the way after a quarter
    assert [root.length_of_step(step) for step in (1, 25, 100)] == [8, 32, 64]
    parts = growing(curriculum_schedule="fixed_discrete", curriculum_lengths=(8, 24, 64), curriculum_max_steps=(10, 20))
    assert [parts.length_of_step(step) for step in (1, 10, 11, 20, 21, 999)] == [8, 8, 24, 24, 64, 64]
    assert [parts.last_step_of_length(step) for step in (1, 10, 15, 21)] == [10, 10, 20, None]


def test_without_a_curriculum_every_sample_is_whole() -> None:
    optim = optim_config(tokens_per_sample=64)
    assert optim.length_of_step(1) == 64 and optim.last_step_of_length(1) is None


def test_the_maximum_is_the_whole_sample_if_it_is_not_given() -> None:
    assert growing(curriculum_max_length=None).length_of_step(1000) == 64
    assert growing(curriculum_max_length=40).length_of_step(1000) == 40  # and shorter samples stay short


@given(
    low=st.integers(1, 40),
    more=st.integers(0, 200),
    steps=st.integers(1, 300),
    by=st.integers(1, 40),
    degree=st.none() | st.floats(1, 4),
    step=st.integers(1, 900),
)
def test_deepspeeds_numbers_and_where_they_change(
    low: int, more: int, steps: int, by: int, degree: float | None, step: int
) -> None:
    low = max(low, by)
    schedule = {} if degree is None else {"curriculum_schedule": "fixed_root", "curriculum_root_degree": degree}
    optim = growing(
        curriculum_min_length=low, curriculum_max_length=low + more, curriculum_steps=steps,
        curriculum_length_step=by, tokens_per_sample=low + more, **schedule,
    )  # fmt: skip
    length = optim.length_of_step(step)
    assert length == as_deepspeed(optim, step) and 1 <= length <= low + more
    last = optim.last_step_of_length(step)
    if last is None:
        assert optim.length_of_step(step + 10**6) == length
    else:
        assert last >= step and optim.length_of_step(last) == length < optim.length_of_step(last + 1)


@pytest.mark.parametrize("steps", [1, 10**12])
def test_long_curricula_are_planned_at_once(steps: int) -> None:
    optim = growing(curriculum_steps=steps)
    last = optim.last_step_of_length(1)
    assert last is None if steps == 1 else last == math.ceil(steps / 7) - 1
