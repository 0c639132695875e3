"""The CUDA kernel that draws initial values, run on a CPU by the emulator: the reference's values, bit for bit."""

from __future__ import annotations

import ctypes

import pytest
import torch

from csrc.emulator import emulator
from megatron.kernels.initial_values import Distribution, WeightDraw, draw_

BASE = 0x9E3779B97F4A7C15
# shape, start, box, first element, count
SMALL = [
    ((6, 21), (2, 7), (3, 7), 4, 16), ((4, 3, 6), (1, 0, 3), (2, 3, 3), 1, 17), ((9,), (2,), (5,), 1, 3),
    ((2**33, 6), (2**33 - 3, 0), (2, 6), 0, 12),
]  # fmt: skip
LARGE = [((40, 1030), (3, 1), (30, 1029), 7, 30000)]


@pytest.mark.parametrize(("build", "order"), [("checked", "random"), ("plain", "reverse")])
@pytest.mark.parametrize("distribution", list(Distribution))
def test_values_are_those_of_the_reference(build: str, order: str, distribution: Distribution) -> None:
    for shape, start, box, first, count in SMALL if build == "checked" else LARGE:
        places = [(ctypes.c_int64 * len(shape))(*numbers) for numbers in (shape, start, box)]
        kind = list((Distribution.NORMAL, Distribution.TRUNCATED_NORMAL, Distribution.UNIFORM)).index(distribution)
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            with emulator.launch("initial_values", build, order) as run:
                target = run.output([count], dtype, shift=1)
                settings = (len(shape), kind, BASE, 0.02, None)
                run.call("megatron_initial_values_fill", target, first, count, dtype, *places, *settings)
            draw = WeightDraw(shape, start, box, BASE, 0.02, distribution)
            assert torch.equal(target.tensor(), draw_(torch.empty(count, dtype=dtype), draw, first))
