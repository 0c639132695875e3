"""Stateless random numbers: each is a hash of its purpose, so it is independent of layout, batch size and recompute.

Weights are hashes of (seed, global name, row, column); hidden dropout, of (seed, dropout site, sample, position,
channel); attention dropout on the CPU, of (seed, layer, sample, head, query, key). On a GPU, attention dropout runs
inside a fused kernel that uses torch's default generator, which is seeded around the call: there the masks may depend
on the tensor-parallel size and the micro-batch size.
"""

from __future__ import annotations

import math
import types
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from megatron.config.architecture.dropout import DROPOUT_STEPS
from megatron.device import default_generator
from megatron.kernels.dropout import masked_scale
from megatron.parallel.shard_spec import Distribution, ShardSpec

_MASK_64 = (1 << 64) - 1
# Constants of splitmix64: the golden-ratio increment and the two multipliers.
_GOLDEN, _MULTIPLIER_1, _MULTIPLIER_2 = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
# Constants of murmur3's 32-bit finalizer.
_MULTIPLIER_3, _MULTIPLIER_4 = 0x85EBCA6B, 0xC2B2AE35
_CUT = 3.0  # standard deviations; truncated normal values lie within
_DRAWN_AT_ONCE = 1 << 19  # pairs; bounds the memory of a draw and keeps it in the cache
_STREAM_WEIGHT, _STREAM_ROW, _STREAM_CHANNEL, _STREAM_ATTENTION, _STREAM_ATTENTION_ROW, _STREAM_KEY = 1, 2, 3, 4, 5, 6


def mix(*numbers: int) -> int:
    """Hashes integers to 64 bits; each one affects all bits of the result.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (the finalizer of
    splitmix64).
    """
    state = 0
    for number in numbers:
        state = (state + number + _GOLDEN) & _MASK_64
        state = ((state ^ (state >> 30)) * _MULTIPLIER_1) & _MASK_64
        state = ((state ^ (state >> 27)) * _MULTIPLIER_2) & _MASK_64
        state ^= state >> 31
    return state


def draw_weights_(
    target: torch.Tensor, spec: ShardSpec, seed: int, global_name: str, *, first: int = 0
) -> torch.Tensor:
    """Fills part of a local tensor in place with its shard of the global tensor's initial values.

    Each value is a hash of (seed, name, row, column): columns are the last dimension of the logical shape, rows all
    others in row-major order. The values are therefore independent of how the tensor is sharded, bit for bit on one
    kind of device. Two columns share 64 random bits. Normal values are float32 Box-Muller pairs from 31 and 32 of them;
    none exceeds 6.66 standard deviations. One core draws about 70 million values per second.

    Shapes: target `[n]`, the local elements `first` to `first + n` in row-major order; vocabulary padding becomes zero.

    Source: Box and Muller, "A note on the generation of random normal deviates", 1958, equation 1.
    """
    last = min(first + target.numel(), spec.box_numel)
    with torch.no_grad():
        target.zero_()
        if last <= first:
            return target
        width = spec.box_shape[-1]
        first_pair, last_pair = spec.start[-1] // 2, (spec.stop[-1] + 1) // 2
        skipped = spec.start[-1] - 2 * first_pair
        rows_at_once = max(1, _DRAWN_AT_ONCE // (last_pair - first_pair))
        base = mix(_STREAM_WEIGHT, seed, zlib.crc32(global_name.encode()), len(global_name))
        values_of = _VALUES[spec.init_distribution]
        last_row = -(-last // width)
        for top in range(first // width, last_row, rows_at_once):
            rows = _global_rows(spec, top, min(last_row, top + rows_at_once), target.device)
            values = values_of(_random_words(base, rows, first_pair, last_pair))[:, skipped : skipped + width]
            low, high = max(first, top * width), min(last, (top + rows.numel()) * width)
            drawn = values.mul_(spec.init_std).reshape(-1)[low - top * width : high - top * width]
            target[low - first : high - first].copy_(drawn)
    return target


def hidden_dropout(
    x: torch.Tensor,
    probability: float,
    *,
    seed: int,
    layer: int,
    sample_ids: torch.Tensor,
    training: bool,
    first_position: int = 0,
) -> torch.Tensor:
    """Zeroes entries of `x` with `probability` and scales up the others, using a hash of each entry's coordinates.

    The probability is rounded to a multiple of 1/65536, and the scale uses the rounded value; the configuration
    refuses one that this would change. The mask (one byte per
    entry) is kept for backward.

    Shapes: x `[b, s, h]`, sample_ids `[b]`.

    Args:
        layer: the dropout site; unique to each call in a forward pass.
        first_position: position of the first entry in its sequence, if the rank holds a later part of it.
    """
    threshold = round(probability * DROPOUT_STEPS)
    if not training or threshold == 0:
        return x
    states = sample_ids.to(x.device) ^ _signed(mix(_STREAM_ROW, seed, layer), 64)  # [b]
    rows = _each(states, first_position, first_position + x.shape[1])  # [b, s]
    return _HashedDropout.apply(x, threshold, rows, mix(_STREAM_CHANNEL, seed, layer))


def attention_dropout(
    probabilities: torch.Tensor, probability: float, *, seed: int, layer: int, sample_ids: torch.Tensor, first_head: int
) -> torch.Tensor:
    """Applies dropout to attention probabilities, using a hash of (seed, layer, sample, head, query, key).

    For devices without fast dropout in fused attention; the mask is independent of the layout.

    Shapes: probabilities `[b, a/t, s, k]`, sample_ids `[b]`.

    Args:
        first_head: global index of the first head that this rank holds.
    """
    threshold = round(probability * DROPOUT_STEPS)
    if threshold == 0:
        return probabilities
    _, heads, queries, _ = probabilities.shape
    states = sample_ids.to(probabilities.device) ^ _signed(mix(_STREAM_ATTENTION_ROW, seed, layer), 64)  # [b]
    rows = _each(_each(states, first_head, first_head + heads), 0, queries)  # [b, a/t, s]
    return _HashedDropout.apply(probabilities, threshold, rows, mix(_STREAM_KEY, seed, layer))


def attention_seed(seed: int, first_sample: int, layer: int, tp_rank: int) -> int:
    """The seed for attention dropout of one layer, micro-batch and tensor-parallel rank.

    Args:
        first_sample: id of the micro-batch's first sample.
    """
    return mix(_STREAM_ATTENTION, seed, first_sample, layer, tp_rank) >> 1


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seeds torch's default generator of `device` for the body, and restores its state afterwards."""
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
        return masked_scale(x, keep, ctx.scale)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        (keep,) = ctx.saved_tensors
        return masked_scale(gradient, keep, ctx.scale), None, None, None


def _kept(rows: torch.Tensor, columns: int, threshold: int, column_base: int) -> torch.Tensor:
    """Which entries to keep: one 32-bit hash of (row, pair of columns) decides two neighbours with 16 bits each.

    Shapes: rows `[...]` int64, hashed; result `[..., columns]` bool.
    """
    pairs = (columns + 1) // 2
    column = _mix_64(_counters(0, pairs, rows.device) ^ _signed(column_base, 64))  # [columns/2]
    bits = _low_half(rows).unsqueeze(-1) ^ _low_half(column)  # [..., columns/2] int32
    bits = _mix_32(bits).view(torch.int16)  # [..., columns or columns + 1]
    keep = bits >= threshold - 32768 if threshold < 65536 else torch.zeros_like(bits, dtype=torch.bool)
    return keep[..., :columns] if keep.shape[-1] != columns else keep


def _each(states: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Hashes every state with each of the integers `[first, last)`.

    Shapes: `[...]` int64 to `[..., last - first]`.
    """
    return _mix_64(_mix_64(states).unsqueeze(-1) + _counters(first, last, states.device))


def _global_rows(spec: ShardSpec, top: int, bottom: int, device: torch.device) -> torch.Tensor:
    """Global row indices of the local rows `[top, bottom)`; rows combine all dimensions but the last.

    Shapes: result `[bottom - top]` int64.
    """
    local = torch.arange(top, bottom, dtype=torch.int64, device=device)
    number, stride = torch.zeros_like(local), 1
    for size, start, held in list(zip(spec.shape, spec.start, spec.box_shape, strict=True))[-2::-1]:
        number += (local % held + start) * stride
        local //= held
        stride *= size
    return number


def _random_words(base: int, numbers: torch.Tensor, first_pair: int, last_pair: int) -> torch.Tensor:
    """32 random bits for each of some rows and the columns `[2 first_pair, 2 last_pair)`.

    Shapes: numbers `[rows]` int64; result `[rows, pairs, 2]` int32.
    """
    rows = _mix_64((numbers * _signed(_GOLDEN, 64)) ^ _signed(base, 64))  # [rows]
    bits = _mix_64(rows.unsqueeze(1) + _counters(first_pair, last_pair, numbers.device))  # [rows, pairs] int64
    return bits.view(torch.int32).view(*bits.shape, 2)


def _normal_values(words: torch.Tensor) -> torch.Tensor:
    """Standard normal values. Shapes: `[rows, pairs, 2]` int32 to `[rows, columns]` float32."""
    uniform = (words[..., 0] & 0x7FFFFFFF).to(torch.float32).add_(0.5).mul_(2.0**-31)  # 2^-32 to 1, never 0
    radius = uniform.log_().mul_(-2.0).sqrt_()
    angle = words[..., 1].to(torch.float32).mul_(math.pi * 2.0**-31)
    values = torch.empty(words.shape, dtype=torch.float32, device=words.device)
    torch.mul(radius, torch.cos(angle), out=values[..., 0])
    torch.mul(radius, angle.sin_(), out=values[..., 1])
    return values.view(words.shape[0], -1)


def _uniform_values(words: torch.Tensor) -> torch.Tensor:
    """Uniform values with standard deviation 1, from -sqrt(3) to sqrt(3). Shapes: as `_normal_values`."""
    return words.reshape(words.shape[0], -1).to(torch.float32).mul_(math.sqrt(3.0) * 2.0**-31)


def _truncated_normal_values(words: torch.Tensor) -> torch.Tensor:
    """Standard normal values between -3 and 3, by the inverse distribution function. Shapes: as `_normal_values`."""
    share = math.erf(_CUT / math.sqrt(2.0))  # probability that a normal value lies within the cut
    values = words.reshape(words.shape[0], -1).to(torch.float32).mul_(share * 2.0**-31)
    return values.erfinv_().mul_(math.sqrt(2.0)).clamp_(-_CUT, _CUT)


_VALUES: Mapping[Distribution, Callable[[torch.Tensor], torch.Tensor]] = types.MappingProxyType(
    {
        Distribution.NORMAL: _normal_values,
        Distribution.UNIFORM: _uniform_values,
        Distribution.TRUNCATED_NORMAL: _truncated_normal_values,
    }
)


def _counters(first: int, last: int, device: torch.device) -> torch.Tensor:
    """Multiples of the golden-ratio increment: successive states of splitmix64."""
    return torch.arange(first, last, dtype=torch.int64, device=device).mul_(_signed(_GOLDEN, 64))


def _mix_64(state: torch.Tensor) -> torch.Tensor:
    """splitmix64's finalizer on int64 (products wrap; shifts extend the sign, so the sign bits are masked off)."""
    state = state ^ ((state >> 30) & ((1 << 34) - 1))
    state.mul_(_signed(_MULTIPLIER_1, 64))
    state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(_signed(_MULTIPLIER_2, 64))
    return state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))


def _mix_32(state: torch.Tensor) -> torch.Tensor:
    """murmur3's finalizer on int32, in place.

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
    """Reinterprets the bits as a signed integer."""
    return number - (1 << bits) if number >> (bits - 1) else number
