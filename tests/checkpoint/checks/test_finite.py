"""Values that are not finite, found in their bytes."""

from __future__ import annotations

import math

import pytest
import torch

from megatron.checkpoint.checks.finite import first_not_finite
from megatron.checkpoint.snapshot import TORCH_TYPES

FLOATS = ("F64", "F32", "F16", "BF16")


def content(values: torch.Tensor) -> memoryview:
    return values.view(torch.uint8).numpy().data


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("value", [math.nan, -math.nan, math.inf, -math.inf])
def test_the_first_is_found_wherever_it_is(dtype: str, value: float) -> None:
    for place in (0, 1, 131_071, 131_072, 299_999):
        values = torch.zeros(300_000, dtype=TORCH_TYPES[dtype])
        values[place:] = value
        assert first_not_finite(content(values), dtype) == place


@pytest.mark.parametrize("dtype", FLOATS)
def test_finite_values_of_every_size_pass(dtype: str) -> None:
    limits = torch.finfo(TORCH_TYPES[dtype])
    values = torch.tensor(
        [0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 2], dtype=TORCH_TYPES[dtype]
    )
    assert values.isfinite().all()
    assert first_not_finite(content(values), dtype) is None


def test_whole_numbers_and_nothing_are_finite() -> None:
    assert first_not_finite(content(torch.full((9,), -1, dtype=torch.int64)), "I64") is None
    assert first_not_finite(memoryview(b""), "F32") is None


def test_bytes_at_any_place_are_read() -> None:
    held = bytearray(3) + torch.tensor([1.0, math.inf]).numpy().tobytes()
    assert first_not_finite(memoryview(held)[3:], "F32") == 1
