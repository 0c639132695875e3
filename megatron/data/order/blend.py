"""The order of a blend: several datasets mixed by weight, so that every prefix of it has the right shares.

Source: bigscience Megatron-DeepSpeed `megatron/data/blendable_dataset.py` and `helpers.cpp` (`build_blending_indices`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.order.index_map import compiled_builder

_SMALL_BLEND = 255
_WIDE_BLEND = 32767
_COUNTED_AT_ONCE = 1 << 22


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Picks the source of every sample: the one furthest behind its share, the first one on a tie.

    The pick at a position does not depend on `size`, so a longer order continues a shorter one.

    Shapes:
        result: source of each sample, uint8 [size] below 255 sources (int16 or int32 above), and its index within
        that source, int64 [size].
    """
    builder = compiled_builder()
    dtype = np.uint8 if len(weights) < _SMALL_BLEND else np.int16 if len(weights) < _WIDE_BLEND else np.int32
    if builder is not None:
        sources, samples = builder.build_blend_index(np.asarray(weights, np.float64), size)
        return sources.astype(dtype, copy=False), samples
    return _blend_order_python(list(weights), size, dtype)


def _blend_order_python(weights: list[float], size: int, dtype: type[np.integer]) -> tuple[np.ndarray, np.ndarray]:
    sources = np.empty(size, dtype)
    samples = np.empty(size, np.int64)
    taken = [0] * len(weights)
    others = range(1, len(weights))
    for position in range(size):
        reached = float(max(position, 1))
        chosen, largest = 0, weights[0] * reached - taken[0]
        for source in others:
            behind = weights[source] * reached - taken[source]
            if behind > largest:
                chosen, largest = source, behind
        sources[position] = chosen
        samples[position] = taken[chosen]
        taken[chosen] += 1
    return sources, samples


def blend_counts(sources: np.ndarray, count: int) -> tuple[int, ...]:
    """Counts the samples that an order takes from each of `count` sources.

    Shapes:
        sources: [samples], as returned by `blend_order`.
    """
    total = np.zeros(count, np.int64)
    for start in range(0, len(sources), _COUNTED_AT_ONCE):
        total += np.bincount(sources[start : start + _COUNTED_AT_ONCE], minlength=count)
    return tuple(int(number) for number in total)
