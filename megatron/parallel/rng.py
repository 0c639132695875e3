"""Random numbers without state: each is a hash of what it is for, so no layout, batch size or recompute changes it.

Weights are a hash of (seed, global name, row, column); hidden dropout is one of (seed, layer slot, sample, position,
channel); attention dropout on CPU is one of (seed, layer, sample, head, query, key). On a GPU attention dropout runs
inside a fused kernel that only knows torch's default generator, which is seeded around the call: there it may differ
with tp and the micro batch.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron import kernels
from megatron.device import default_generator
from megatron.errors import ConfigError
from megatron.parallel.placement import placement_of

_MASK_64 = (1 << 64) - 1
# Constants of splitmix64: the golden-ratio increment and the two multipliers.
_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Constants of murmur3's 32-bit finaliser.
_MULTIPLIER_3, _MULTIPLIER_4 = 0x85EBCA6B, 0xC2B2AE35
_DRAWN_AT_ONCE = 1 << 19  # pairs; bounds the memory of a draw and keeps it in the cache
_STREAM_WEIGHT, _STREAM_ROW, _STREAM_CHANNEL, _STREAM_ATTENTION, _STREAM_ATTENTION_ROW, _STREAM_KEY = 1, 2, 3, 4, 5, 6


def mix(*numbers: int) -> int:
    """Hashes whole numbers to 64 bits, each one changing all bits of the result.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the finaliser of
    splitmix64).
    """
    state = 0
    for number in numbers:
        state = (state + number + _GOLDEN) & _MASK_64
        state = ((state ^ (state >> 30)) * _MULTIPLIER_1) & _MASK_64
        state = ((state ^ (state >> 27)) * _MULTIPLIER_2) & _MASK_64
        state ^= state >> 31
    return state


def normal_(parameter: torch.Tensor, seed: int, global_name: str, std: float) -> torch.Tensor:
    """Fills a weight in place with its part of the global tensor's N(0, std^2) values; what only pads it becomes zero.

    The value at (row, column) is a hash of (seed, name, row, column), so any split of the tensor holds the same values,
    bit for bit on one kind of device. Two columns share a Box-Muller pair in float32: 31 and 32 random bits, nothing
    beyond 6.66 standard deviations. About 70 million values a second on one core.

    Shapes: `[rows]` (drawn as one row) or `[rows, columns]`, placed by `parameter.placement`; without one it is the
    whole tensor.

    Raises:
        ConfigError: more than two dimensions.

    Source: Box and Muller, "A note on the generation of random normal deviates", 1958, equation 1.
    """
    placement = placement_of(parameter)
    if len(placement.shape) > 2:
        raise ConfigError(f"{global_name} has {len(placement.shape)} dimensions; values are drawn for 1 or 2 only.")
    start, stop = placement.start, placement.stop
    if len(start) == 1:
        start, stop = (0, *start), (1, *stop)
    height, width = stop[0] - start[0], stop[1] - start[1]
    with torch.no_grad():
        parameter.zero_()
        if height <= 0 or width <= 0:
            return parameter
        target = parameter if parameter.dim() == 2 else parameter.unsqueeze(0)
        first_pair, last_pair = start[1] // 2, (stop[1] + 1) // 2
        rows_at_once = max(1, _DRAWN_AT_ONCE // (last_pair - first_pair))
        base = mix(_STREAM_WEIGHT, seed, zlib.crc32(global_name.encode()), len(global_name))
        for top in range(0, height, rows_at_once):
            bottom = min(height, top + rows_at_once)
            values = _normal_rows(base, start[0] + top, start[0] + bottom, first_pair, last_pair, parameter.device)
            skipped = start[1] - 2 * first_pair
            target[top:bottom, :width].copy_(values[:, skipped : skipped + width].mul_(std))
    return parameter


def hidden_dropout(
    x: torch.Tensor, probability: float, *, seed: int, layer: int, sample_ids: torch.Tensor, training: bool
) -> torch.Tensor:
    """Zeroes entries of `x` with `probability` and scales the others up, by a hash of what each entry is.

    The probability is rounded to 1/65536, and the scale fits the rounded one. The mask (one byte an entry) is kept for
    backward.

    Shapes: x `[b, s, h]`, sample_ids `[b]`.

    Args:
        layer: the place in the network; every call in one forward pass has its own.
    """
    threshold = round(probability * 65536)
    if not training or threshold == 0:
        return x
    rows = _each(sample_ids.to(x.device) ^ _signed(mix(_STREAM_ROW, seed, layer), 64), 0, x.shape[1])  # [b, s]
    return _HashedDropout.apply(x, threshold, rows, mix(_STREAM_CHANNEL, seed, layer))


def attention_dropout(
    probabilities: torch.Tensor, probability: float, *, seed: int, layer: int, sample_ids: torch.Tensor, first_head: int
) -> torch.Tensor:
    """The same for attention probabilities, by a hash of (seed, layer, sample, head, query, key).

    For devices whose fused attention has no fast dropout; it does not depend on the layout either.

    Shapes: probabilities `[b, a/t, s, k]`, sample_ids `[b]`.

    Args:
        first_head: global number of the first head that this rank holds.
    """
    threshold = round(probability * 65536)
    if threshold == 0:
        return probabilities
    _, heads, queries, _ = probabilities.shape
    states = sample_ids.to(probabilities.device) ^ _signed(mix(_STREAM_ATTENTION_ROW, seed, layer), 64)  # [b]
    rows = _each(_each(states, first_head, first_head + heads), 0, queries)  # [b, a/t, s]
    return _HashedDropout.apply(probabilities, threshold, rows, mix(_STREAM_KEY, seed, layer))


def attention_seed(seed: int, sample_ids: torch.Tensor, layer: int, tp_rank: int) -> int:
    """A seed for the attention dropout of one layer, micro batch and tensor-parallel rank.

    Reading the first sample id from a GPU waits for it; the answer is kept on the tensor, so a stage waits once a micro
    batch.
    """
    known = getattr(sample_ids, "_first_on_host", None)
    if known is None or known[0] != sample_ids._version:
        known = (sample_ids._version, int(sample_ids[0].item()))
        sample_ids._first_on_host = known  # type: ignore[attr-defined]
    return mix(_STREAM_ATTENTION, seed, known[1], layer, tp_rank) >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Runs the body with torch's default generator of `device` at `seed`, and puts its state back afterwards."""
    generator = default_generator(device)
    state = generator.get_state()
    generator.manual_seed(seed)
    try:
        yield
    finally:
        generator.set_state(state)


class _HashedDropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, threshold, rows, column_base):  # type: ignore[no-untyped-def]
        keep = _kept(rows, x.shape[-1], threshold, column_base)
        ctx.save_for_backward(keep)
        ctx.scale = 65536.0 / (65536 - threshold) if threshold < 65536 else 0.0
        return kernels.masked_scale(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (keep,) = ctx.saved_tensors
        return kernels.masked_scale(gradient, keep, ctx.scale), None, None, None


def _kept(rows: torch.Tensor, columns: int, threshold: int, column_base: int) -> torch.Tensor:
    """Which entries stay: one 32-bit hash of (row, pair of columns) decides two neighbours by 16 bits each.

    Shapes: rows `[...]` int64, hashed; result `[..., columns]` bool.
    """
    pairs = (columns + 1) // 2
    column = _mix_64(_counters(0, pairs, rows.device) ^ _signed(column_base, 64))  # [columns/2]
    bits = _low_half(rows).unsqueeze(-1) ^ _low_half(column)  # [..., columns/2] int32
    bits = _mix_32(bits).view(torch.int16)  # [..., columns or columns + 1]
    keep = bits >= threshold - 32768 if threshold < 65536 else torch.zeros_like(bits, dtype=torch.bool)
    return keep[..., :columns] if keep.shape[-1] != columns else keep


def _each(states: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Hashes every state with each of the numbers `[first, last)`.

    Shapes: `[...]` int64 to `[..., last - first]`.
    """
    return _mix_64(_mix_64(states).unsqueeze(-1) + _counters(first, last, states.device))


def _normal_rows(
    base: int, top: int, bottom: int, first_pair: int, last_pair: int, device: torch.device
) -> torch.Tensor:
    """Standard normal values of rows `[top, bottom)` and columns `[2 first_pair, 2 last_pair)`, float32."""
    rows = _mix_64(_counters(top, bottom, device) ^ _signed(base, 64))  # [rows]
    bits = _mix_64(rows.unsqueeze(1) + _counters(first_pair, last_pair, device))  # [rows, pairs] int64
    words = bits.view(torch.int32).view(*bits.shape, 2)
    uniform = (words[..., 0] & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)  # 2^-32 to 1, never 0
    radius = uniform.log_().mul_(-2.0).sqrt_()
    angle = words[..., 1].to(torch.float32).mul_(math.pi * 2.0**-31)
    values = torch.empty(*bits.shape, 2, dtype=torch.float32, device=device)
    torch.mul(radius, torch.cos(angle), out=values[..., 0])
    torch.mul(radius, angle.sin_(), out=values[..., 1])
    return values.view(bits.shape[0], -1)


def _counters(first: int, last: int, device: torch.device) -> torch.Tensor:
    """Multiples of the golden-ratio increment: successive states of splitmix64."""
    return torch.arange(first, last, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN, 64))


def _mix_64(state: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64 (their products wrap; shifts copy the sign, so the copies are masked away)."""
    state = state ^ ((state >> 30) & ((1 << 34) - 1))
    state.mul_(_signed(_MULTIPLIER_1, 64))
    state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MULTIPLIER_2, 64))
    return state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))


def _mix_32(state: torch.Tensor) -> torch.Tensor:
    """murmur3's finaliser on int32, in place.

    Source: Appleby, MurmurHash3, `fmix32`.
    """
    shifted = torch.empty_like(state)
    for shift, multiplier in ((16, _MULTIPLIER_3), (13, _MULTIPLIER_4), (16, None)):
        torch.bitwise_right_shift(state, shift, out=shifted)
        state.bitwise_xor_(shifted.bitwise_and_((1 << (32 - shift)) - 1))
        if multiplier is not None:
            state.mul_(_signed(multiplier, 32))
    return state


def _low_half(state: torch.Tensor) -> torch.Tensor:
    """The low 32 bits of an int64 tensor, as int32."""
    return state.contiguous().view(torch.int32).view(*state.shape, 2)[..., 0]


def _signed(number: int, bits: int) -> int:
    """The same bits read as a signed number."""
    return number - (1 << bits) if number >> (bits - 1) else number
