"""Initial values of weights: hashes of (name, row, column), transformed to random numbers of a distribution.

Both implementations are bitwise equal on CPUs and GPUs: after the hashes, they use only operations that IEEE 754 rounds
correctly (sums, products, quotients and square roots, in float64 where it matters), without fusing any. Logarithm, sine
and cosine, whose last bits differ between libraries, are polynomials.
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import torch

from megatron.kernels.choice import Implementation
from megatron.kernels.hashing import GOLDEN, counters, half_words, mix_64, signed

_CUT = 3.0  # standard deviations; bound of truncated normal values
_DRAWN_AT_ONCE = 1 << 16  # pairs per block; limits the memory of a draw, so that it stays in cache

# Minimax polynomials, constant coefficient first; relative errors are below 6e-9.
_SINE = (1.570796318447937, -0.6459637106020997, 0.07968967895307584, -0.004673766615967761, 0.00015148513087447275)
_COSINE = (0.9999999990182386, -0.2337005029853599, 0.019968590074769286, -0.0008935099166937137, 2.3587977457569213e-5)
_ARTANH = (1.9999999986208028, 0.6666681599584556, 0.39974789785924614, 0.2992579086113471)
_NUMERATOR = (
    *(0.0022582020610570908, 0.17814379930496216, 2.2050416469573975),
    *(5.966310977935791, 2.7055394649505615, 0.03350241109728813),
)
_DENOMINATOR = (
    *(0.0004790059756487608, 0.049394283443689346, 0.8056975603103638),
    *(3.2911462783813477, 3.702458143234253, 1.0),
)
_UNIT = 2.0**-30  # quarter turns
_SINE_OF_UNITS = tuple(c * _UNIT ** (2 * k + 1) for k, c in enumerate(_SINE))
_COSINE_OF_UNITS = tuple(c * _UNIT ** (2 * k + 2) for k, c in enumerate(_COSINE))
_MINUS_TWO_ARTANH = tuple(-2.0 * c for c in _ARTANH)
_MINUS_TWO_LN2 = -2.0 * math.log(2.0) * 2.0**-23  # of an exponent in the place of a float32's
_ONE, _ROOT_OF_HALF = 0x3F800000, 0x3F3504F3  # bits of float32 numbers


class Distribution(Enum):
    """A distribution of initial values."""

    NORMAL = "normal"
    TRUNCATED_NORMAL = "normal, cut at three standard deviations"
    UNIFORM = "uniform"


@dataclass(frozen=True)
class WeightDraw:
    """The initial values of this rank's part of one parameter.

    Columns are the last dimension; rows are all others in row-major order.

    Attributes:
        shape: shape of the global tensor.
        start: first global index of this rank's part, per dimension.
        box: shape of this rank's part.
        base: hash of seed and name, the start value of the rows' hashes.
        deviation: standard deviation (before truncation).
    """

    shape: Sequence[int]
    start: Sequence[int]
    box: Sequence[int]
    base: int
    deviation: float
    distribution: Distribution = Distribution.NORMAL


def draw_(
    target: torch.Tensor, draw: WeightDraw, first: int = 0, *, implementation: Implementation = Implementation.TORCH
) -> torch.Tensor:
    """Fills a tensor with elements `first` to `first + n` of a draw, in place.

    Normal values are Box-Muller pairs from 31 and 32 random bits; none exceeds 6.66 standard deviations. Before the
    product with the deviation, values are within 2 ulp of the formula.

    Shapes: target `[n]`, contiguous; float32, or a half precision that values are rounded to.

    Source: Box and Muller, "A note on the generation of random normal deviates", 1958, equation 1.
    """
    if target.numel() == 0:
        return target
    if implementation is Implementation.CSRC:
        part = (list(draw.shape), list(draw.start), list(draw.box))
        kind = _KINDS[draw.distribution]
        torch.ops.megatron.initial_values_(target, first, *part, kind, signed(draw.base, 64), draw.deviation)
        return target
    last, width, start = first + target.numel(), draw.box[-1], draw.start[-1]
    first_pair, last_pair = start // 2, (start + width + 1) // 2
    skipped, rows_at_once = start - 2 * first_pair, max(1, _DRAWN_AT_ONCE // (last_pair - first_pair))
    values_of, last_row = _VALUES[draw.distribution], -(-last // width)
    for top in range(first // width, last_row, rows_at_once):
        rows = _global_rows(draw, top, min(last_row, top + rows_at_once), target.device)
        values = values_of(_random_bits(draw.base, rows, first_pair, last_pair))[:, skipped : skipped + width]
        low, high = max(first, top * width), min(last, (top + rows.numel()) * width)
        drawn = values.mul_(draw.deviation).reshape(-1)[low - top * width : high - top * width]
        target[low - first : high - first].copy_(drawn)
    return target


def register() -> None:
    """Registers with torch that the compiled operation returns nothing; once, after the library is loaded."""
    torch.library.register_fake("megatron::initial_values_", lambda *arguments: None)


def _global_rows(draw: WeightDraw, top: int, bottom: int, device: torch.device) -> torch.Tensor:
    """Global row indices of the local rows `[top, bottom)`.

    Shapes: result `[bottom - top]` int64.
    """
    local = torch.arange(top, bottom, dtype=torch.int64, device=device)
    number, stride = torch.zeros_like(local), 1
    for size, offset, local_size in list(zip(draw.shape, draw.start, draw.box, strict=True))[-2::-1]:
        number += (local % local_size + offset) * stride
        local //= local_size
        stride *= size
    return number


def _random_bits(base: int, numbers: torch.Tensor, first_pair: int, last_pair: int) -> torch.Tensor:
    """32 random bits for each of the given rows and the columns `[2 first_pair, 2 last_pair)`.

    Shapes: numbers `[rows]` int64; result `[rows, pairs, 2]` int32.
    """
    rows = mix_64((numbers * signed(GOLDEN, 64)) ^ signed(base, 64))  # [rows]
    bits = mix_64(rows.unsqueeze(1) + counters(first_pair, last_pair, numbers.device))  # [rows, pairs] int64
    return half_words(bits).unflatten(-1, (-1, 2))


def _normal_values(bits: torch.Tensor) -> torch.Tensor:
    """Standard normal values. Shapes: `[rows, pairs, 2]` int32 to `[rows, columns]` float32.

    The angle is the second number times pi / 2^31. Angles beyond a quarter turn are turned by a half, which flips both
    signs; the rest is x quarter turns / 2^30, exactly.
    """
    radius = _normal_radius(bits[..., 0] & 0x7FFFFFFF)
    turns = bits[..., 1].contiguous()
    sign = (turns + (1 << 30)).bitwise_and_(-(1 << 31))
    radius.view(torch.int32).bitwise_xor_(sign)
    wide_radius, x = radius.double(), turns.sub_(sign).double()
    square = x * x
    values = torch.empty(bits.shape, dtype=torch.float32, device=bits.device)
    values[..., 1] = _polynomial(square, _SINE_OF_UNITS).mul_(x).mul_(wide_radius)
    quarter = (2.0**30 - x).mul_(x.add_(2.0**30))  # zero where the cosine is
    values[..., 0] = _polynomial(square, _COSINE_OF_UNITS).mul_(wide_radius).mul_(quarter)
    return values.view(bits.shape[0], -1)


def _normal_radius(numbers: torch.Tensor) -> torch.Tensor:
    """`sqrt(-2 ln u)` of `u = (number + 0.5) / 2^31`, which is strictly between 0 and 1.

    u is split into 2^k m with m about between sqrt(1/2) and sqrt(2), by the exponent of its float32;
    ln m = 2 artanh((m - 1) / (m + 1)).

    Shapes: numbers `[...]` int32, from 0; result `[...]` float32.
    """
    scaled = numbers.double().add_(0.5)
    exponent = scaled.float().view(torch.int32).sub_(_ROOT_OF_HALF).bitwise_and_(-(1 << 23))
    of_exponent = exponent.double().mul_(_MINUS_TWO_LN2).add_(62.0 * math.log(2.0))
    m = scaled.mul_(exponent.neg_().add_(_ONE).view(torch.float32).double())
    s = m - 1.0
    s.div_(m.add_(1.0))
    return _exact_root(_polynomial(torch.mul(s, s, out=m), _MINUS_TWO_ARTANH).mul_(s).add_(of_exponent)).float()


def _uniform_values(bits: torch.Tensor) -> torch.Tensor:
    """Uniform values with standard deviation 1, from -sqrt(3) to sqrt(3). Shapes: as `_normal_values`."""
    return bits.reshape(bits.shape[0], -1).to(torch.float32).mul_(math.sqrt(3.0) * 2.0**-31)


def _truncated_normal_values(bits: torch.Tensor) -> torch.Tensor:
    """Standard normal values between -3 and 3, by the inverse distribution function. Shapes: as `_normal_values`.

    `sqrt(2) erfinv(x)` is x times a rational function of `sqrt(1 - x^2)`, a minimax fit with positive coefficients.
    """
    share = math.erf(_CUT / math.sqrt(2.0))  # probability of a normal value within the cut
    x = bits.reshape(bits.shape[0], -1).double().mul_(share * 2.0**-31)
    rest = _exact_root((1.0 - x).mul_(x + 1.0)).float().double()
    ratio = _polynomial(rest, _NUMERATOR).div_(_polynomial(rest, _DENOMINATOR))
    return ratio.mul_(x).float().clamp_(-_CUT, _CUT)


def _exact_root(x: torch.Tensor) -> torch.Tensor:
    """A float64 number that rounds to the same float32 as the exact square root of `x.float()`.

    torch's float32 root on a CPU may be wrong in the last bit. In float64 that does no harm: the root of a float32
    number is never so close to the midpoint of two float32 numbers.
    """
    return x.float().double().sqrt_()


def _polynomial(x: torch.Tensor, coefficients: Sequence[float]) -> torch.Tensor:
    """Horner's rule, rounded after every operation; constant coefficient first."""
    result = x * coefficients[-1]
    for coefficient in coefficients[-2:0:-1]:
        result.add_(coefficient).mul_(x)
    return result.add_(coefficients[0])


_KINDS: Mapping[Distribution, int] = types.MappingProxyType(
    {Distribution.NORMAL: 0, Distribution.TRUNCATED_NORMAL: 1, Distribution.UNIFORM: 2}
)
_VALUES: Mapping[Distribution, Callable[[torch.Tensor], torch.Tensor]] = types.MappingProxyType(
    {
        Distribution.NORMAL: _normal_values,
        Distribution.UNIFORM: _uniform_values,
        Distribution.TRUNCATED_NORMAL: _truncated_normal_values,
    }
)
