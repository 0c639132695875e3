"""Several data sets mixed by weight, in an order in which every prefix already has the right shares.

Source: bigscience Megatron-DeepSpeed `megatron/data/blendable_dataset.py` and `helpers.cpp` (`build_blending_indices`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.gpt_dataset import GPTDataset
from megatron.data.index_map import compiled_builder
from megatron.errors import DataError

_SMALL_BLEND = 255
_WIDE_BLEND = 32767


def blend_order(weights: Sequence[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    """Chooses the source of every sample: always the one furthest behind its share, the first of equals.

    The choice at a position does not depend on `size`, so a longer order continues a shorter one.

    Shapes:
        result: source of each sample, uint8 [size] below 255 sources (int16, int32 above), and its number in that
        source, int64 [size].
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


class BlendedDataset:
    """Samples of several data sets in blended order.

    Args:
        sources, samples: what `blend_order` gave.

    Raises:
        DataError: the order asks a data set for more samples than it has.
    """

    def __init__(self, datasets: Sequence[GPTDataset], sources: np.ndarray, samples: np.ndarray) -> None:
        self.datasets = tuple(datasets)
        self._sources = sources
        self._samples = samples
        self.taken = tuple(int(count) for count in np.bincount(sources, minlength=len(datasets)))
        for dataset, count in zip(self.datasets, self.taken, strict=True):
            if count > len(dataset):
                raise DataError(
                    f"The blend takes {count} samples of {dataset.prefix}, which has {len(dataset)} planned."
                )

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1] of a sample."""
        return self.datasets[self.source_of(sample)][int(self._samples[sample])]

    def source_of(self, sample: int) -> int:
        """Which data set a sample comes from."""
        return int(self._sources[sample])

    def locate(self, sample: int, position: int) -> str:
        """Where a token of a sample is stored, in words."""
        return self.datasets[self.source_of(sample)].locate(int(self._samples[sample]), position)
