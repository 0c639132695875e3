"""Initial values against their formula in float64."""

from __future__ import annotations

import math

import torch

from megatron.kernels.initial_values import _normal_values, _truncated_normal_values
from megatron.kernels.native.library import Library


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


def test_torch_knows_the_operation(compiled: Library) -> None:
    arguments = (0, [4, 6], [0, 0], [4, 6], 0, 5, 0.5)
    torch.library.opcheck(torch.ops.megatron.initial_values_.default, (torch.zeros(24), *arguments))
