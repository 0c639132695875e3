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
from megatron.kernels.dropout_add import Dropout
from megatron.kernels.hashing import GOLDEN, counters, mix, mix_64, signed
from megatron.parallel.shard_spec import Distribution, ShardSpec

_CUT = 3.0  # standard deviations; truncated normal values lie within
_DRAWN_AT_ONCE = 1 << 19  # pairs; bounds the memory of a draw and keeps it in the cache
_STREAM_WEIGHT, _STREAM_ROW, _STREAM_CHANNEL, _STREAM_ATTENTION, _STREAM_ATTENTION_ROW, _STREAM_KEY = 1, 2, 3, 4, 5, 6


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
    probability: float, *, seed: int, layer: int, sample_ids: torch.Tensor, length: int, first_position: int = 0
) -> Dropout | None:
    """Which entries of hidden states `[b, s, h]` are zeroed: a hash of (seed, site, sample, position, channel).

    The probability is rounded to a multiple of 1/65536, and the scale uses the rounded value; the configuration
    refuses one that this would change. None if nothing is.

    Shapes: sample_ids `[b]`; rows of the result `[b, s]`.

    Args:
        layer: the dropout site; unique to each call in a forward pass.
        length: s.
        first_position: position of the first entry in its sequence, if the rank holds a later part of it.
    """
    threshold = round(probability * DROPOUT_STEPS)
    if threshold == 0:
        return None
    states = sample_ids ^ signed(mix(_STREAM_ROW, seed, layer), 64)  # [b]
    rows = _each(states, first_position, first_position + length)
    return Dropout(rows, threshold, mix(_STREAM_CHANNEL, seed, layer))


def attention_dropout(
    probability: float, *, seed: int, layer: int, sample_ids: torch.Tensor, first_head: int, heads: int, queries: int
) -> Dropout | None:
    """Which attention probabilities `[b, a/t, s, k]` are zeroed: a hash of (seed, layer, sample, head, query, key).

    For devices without fast dropout in fused attention; it is independent of the layout.

    Shapes: sample_ids `[b]`; rows of the result `[b, a/t, s]`.

    Args:
        first_head: global index of the first head that this rank holds.
        heads: number of heads that this rank holds, a/t.
        queries: s.
    """
    threshold = round(probability * DROPOUT_STEPS)
    if threshold == 0:
        return None
    states = sample_ids ^ signed(mix(_STREAM_ATTENTION_ROW, seed, layer), 64)  # [b]
    rows = _each(_each(states, first_head, first_head + heads), 0, queries)
    return Dropout(rows, threshold, mix(_STREAM_KEY, seed, layer))


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


def _each(states: torch.Tensor, first: int, last: int) -> torch.Tensor:
    """Hashes every state with each of the integers `[first, last)`.

    Shapes: `[...]` int64 to `[..., last - first]`.
    """
    return mix_64(mix_64(states).unsqueeze(-1) + counters(first, last, states.device))


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
    rows = mix_64((numbers * signed(GOLDEN, 64)) ^ signed(base, 64))  # [rows]
    bits = mix_64(rows.unsqueeze(1) + counters(first_pair, last_pair, numbers.device))  # [rows, pairs] int64
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
