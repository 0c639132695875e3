"""Initial values: the formula in float64, and the compiled operation equal to the reference, bit for bit."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.initial_values import Distribution, WeightDraw, _normal_values, _truncated_normal_values, draw_
from megatron.kernels.native.library import Library

BASE = 0x9E3779B97F4A7C15
# shape, start, box, first element, count
PLACES = [
    ((36, 21), (0, 0), (36, 21), 0, 756),
    ((36, 21), (6, 7), (12, 7), 5, 60),
    ((4, 3, 6), (1, 0, 3), (2, 3, 3), 1, 17),
    ((9,), (2,), (5,), 1, 3),
    ((2**33, 6), (2**33 - 3, 0), (2, 6), 0, 12),
    ((70, 1030), (0, 1), (70, 1029), 0, 70 * 1029),
]


def _words() -> torch.Tensor:
    """Random bits, and those at which the formulas have their edges."""
    words = torch.randint(-(2**31), 2**31, (512, 512, 2), dtype=torch.int32, generator=torch.Generator().manual_seed(1))
    near = torch.arange(-256, 256)
    for row, centre in enumerate((0, 2**29, 2**30, -(2**30), 3 * 2**29)):
        words[row, :, 0] = words[row, :, 1] = (near + centre).to(torch.int32)
    words[5, :, 0] = (2**31 - 1 - torch.arange(512)).to(torch.int32)
    words[6, :, 0], words[6, :, 1] = torch.arange(512), (torch.arange(512) - 2**31).to(torch.int32)
    return words


def _ulps(values: torch.Tensor, exact: torch.Tensor) -> float:
    size = exact.abs().float()
    ulp = torch.nextafter(size, torch.tensor(math.inf)).double() - size.double()
    return float(((values.double() - exact).abs() / ulp).max())


def test_normal_values_are_those_of_the_formula() -> None:
    words = _words()
    share = ((words[..., 0] & 0x7FFFFFFF).double() + 0.5) * 2.0**-31
    radius = (-2.0 * torch.where(share > 0.5, torch.log1p(share - 1.0), share.log())).sqrt()
    quarter = (words[..., 1].long() + 2**29) >> 30  # the nearest; the rest of the angle is exact
    rest = (words[..., 1].long() - (quarter << 30)).double() * (math.pi * 2.0**-31)
    is_odd, cosine, sine = quarter % 2 == 1, rest.cos(), rest.sin()
    signs = [1.0 - 2.0 * (((quarter + turn) % 4) >= 2).double() for turn in (1, 0)]
    parts = torch.where(is_odd, sine, cosine) * signs[0], torch.where(is_odd, cosine, sine) * signs[1]
    exact = torch.stack([radius * part for part in parts], -1).view(512, -1)
    found = _normal_values(words.clone())
    is_zero = exact == 0
    assert torch.equal(found == 0, is_zero)
    assert _ulps(found[~is_zero], exact[~is_zero]) <= 2
    assert float(found.abs().max()) < 6.67


def test_truncated_normal_values_are_those_of_the_formula() -> None:
    words = _words()
    exact = torch.erfinv(words.view(512, -1).double() * (math.erf(3 / math.sqrt(2)) * 2.0**-31)) * math.sqrt(2)
    found = _truncated_normal_values(words)
    is_zero = exact == 0
    assert torch.equal(found == 0, is_zero)
    assert _ulps(found[~is_zero], exact.clamp(-3, 3)[~is_zero]) <= 2


@pytest.mark.parametrize("distribution", list(Distribution))
def test_compiled_values_have_the_same_bits(compiled: Library, distribution: Distribution) -> None:
    before = torch.get_num_threads()
    try:
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            for shape, start, box, first, count in PLACES:
                draw = WeightDraw(shape, start, box, BASE, 0.02, distribution)
                expected = draw_(torch.empty(count, dtype=dtype), draw, first)
                for threads in (1, 2):
                    torch.set_num_threads(threads)
                    found = torch.full((count + 1,), 7.0, dtype=dtype)
                    draw_(found[1:], draw, first, implementation=Implementation.CSRC)
                    assert torch.equal(found[1:], expected)
                    assert found[0] == 7.0
    finally:
        torch.set_num_threads(before)


def _fill(target: torch.Tensor, first: int, shape: Sequence[int], box: Sequence[int], kind: int = 0) -> None:
    torch.ops.megatron.initial_values_(target, first, shape, [0] * len(box), box, kind, 1, 1.0)


def test_torch_knows_the_operation(compiled: Library) -> None:
    arguments = (0, [4, 6], [0, 0], [4, 6], 0, 5, 0.5)
    torch.library.opcheck(torch.ops.megatron.initial_values_.default, (torch.zeros(24), *arguments))
    for sentence, refused in (
        (r"elements 20 to 25 do not lie within the 24", lambda: _fill(torch.zeros(5), 20, [4, 6], [4, 6])),
        (r"does not lie within the shape \[4, 6\]", lambda: _fill(torch.zeros(5), 0, [4, 6], [4, 7])),
        (r"one entry for each of 1 to 8 dimensions", lambda: _fill(torch.zeros(5), 0, [4, 6], [4])),
        (r"distribution is 3; it must be 0", lambda: _fill(torch.zeros(5), 0, [4, 6], [4, 6], 3)),
        (r"target must be contiguous", lambda: _fill(torch.zeros(10)[::2], 0, [4, 6], [4, 6])),
        (r"target is float64", lambda: _fill(torch.zeros(5).double(), 0, [4, 6], [4, 6])),
    ):
        with pytest.raises(RuntimeError, match=sentence):
            refused()
