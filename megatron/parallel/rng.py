"""Stateless random numbers: hashes of their purpose, so independent of layout, batch size and recompute.

Weights are hashes of (seed, global name, row, column); hidden dropout, of (seed, dropout site, sample, position,
channel); attention dropout on the CPU, of (seed, layer, sample, head, query, key). On a GPU, attention dropout runs
inside a fused kernel on torch's default generator, which is seeded around the call: its masks may depend on the
tensor-parallel size and the micro-batch size.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.config.architecture.dropout import DROPOUT_STEPS
from megatron.device import default_generator
from megatron.kernels.choice import Implementation
from megatron.kernels.dropout_add import Dropout
from megatron.kernels.hashing import GOLDEN, counters, mix, mix_64, signed
from megatron.kernels.initial_values import WeightDraw, draw_
from megatron.parallel.shard_spec import ShardSpec

_STREAM_WEIGHT, _STREAM_ROW, _STREAM_CHANNEL, _STREAM_ATTENTION, _STREAM_ATTENTION_ROW, _STREAM_KEY = 1, 2, 3, 4, 5, 6


def draw_weights_(
    target: torch.Tensor,
    spec: ShardSpec,
    seed: int,
    global_name: str,
    *,
    first: int = 0,
    implementation: Implementation = Implementation.TORCH,
) -> torch.Tensor:
    """Fills part of a local tensor in place with its shard of the global tensor's initial values.

    Each value is a hash of (seed, name, row, column): columns are the last dimension of the logical shape, rows all
    others in row-major order. The values are therefore independent of how the tensor is sharded, bit for bit, and the
    same on every device.

    Shapes: target `[n]`, the local elements `first` to `first + n` in row-major order; vocabulary padding becomes zero.
    """
    count = max(0, min(target.numel(), spec.box_numel - first))
    base = mix(_STREAM_WEIGHT, seed, zlib.crc32(global_name.encode()), len(global_name))
    draw = WeightDraw(spec.shape, spec.start, spec.box_shape, base, spec.init_std, spec.init_distribution)
    with torch.no_grad():
        target[count:].zero_()
        draw_(target[:count], draw, first, implementation=implementation)
    return target


def hidden_keys(seed: int, layer: int) -> tuple[int, int]:
    """The initial states of the row and column hashes at a site of `hidden_dropout`; 64 bits, the first signed."""
    return signed(mix(_STREAM_ROW, seed, layer), 64), mix(_STREAM_CHANNEL, seed, layer)


def attention_keys(seed: int, layer: int) -> tuple[int, int]:
    """The initial states of the row and column hashes in a layer of `attention_dropout`."""
    return signed(mix(_STREAM_ATTENTION_ROW, seed, layer), 64), mix(_STREAM_KEY, seed, layer)


def hidden_dropout(
    probability: float,
    *,
    keys: tuple[int, int] | torch.Tensor,
    sample_ids: torch.Tensor,
    length: int,
    first_position: int = 0,
    positions: torch.Tensor | None = None,
) -> Dropout | None:
    """The dropout mask of hidden states `[b, s, h]`: a hash of (seed, site, sample, position, channel).

    The probability is rounded to a multiple of 1/65536, and the scale uses the rounded value; the configuration rejects
    one that this changes by more than 1%. None for probability 0.

    Shapes: sample_ids `[b]`; positions `[s]` or `[b, s]` int64; rows of the result `[b, s]`.

    Args:
        keys: `hidden_keys` of the site, which is unique to each call in a forward pass; a tensor `[2]` int64 under
            torch.compile, which would otherwise compile a program for each site.
        length: s.
        first_position: position of the first entry in its sequence, if the rank holds a later part of it.
        positions: the positions in the sequence, if they are not consecutive.
    """
    threshold = round(probability * DROPOUT_STEPS)
    if threshold == 0:
        return None
    row_key, column_key = keys
    if positions is None:
        rows = _each(sample_ids ^ row_key, first_position, first_position + length)
    else:
        rows = mix_64(mix_64(sample_ids ^ row_key).unsqueeze(-1) + positions * signed(GOLDEN, 64))
    return Dropout(rows, threshold, column_key)


def attention_dropout(
    probability: float,
    *,
    keys: tuple[int, int] | torch.Tensor,
    sample_ids: torch.Tensor,
    first_head: int,
    heads: int,
    queries: int,
) -> Dropout | None:
    """The dropout mask of attention probabilities `[b, a/t, s, k]`: a hash of (seed, layer, sample, head, query, key).

    For devices without fast dropout in fused attention; independent of the layout.

    Shapes: sample_ids `[b]`; rows of the result `[b, a/t, s]`.

    Args:
        keys: `attention_keys` of the layer, in the form used by `hidden_dropout`.
        first_head: global index of the first head that this rank holds.
        heads: number of heads that this rank holds, a/t.
        queries: s.
    """
    threshold = round(probability * DROPOUT_STEPS)
    if threshold == 0:
        return None
    row_key, column_key = keys
    rows = _each(_each(sample_ids ^ row_key, first_head, first_head + heads), 0, queries)
    return Dropout(rows, threshold, column_key)


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
