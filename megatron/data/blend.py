"""Several data sets mixed by weight, in an order in which every prefix already has the right shares; and several such
orders one after the other, where a run changed its blend.

Source: bigscience Megatron-DeepSpeed `megatron/data/blendable_dataset.py` and `helpers.cpp` (`build_blending_indices`).
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megatron.data.index_map import compiled_builder
from megatron.data.sample import Piece, Sample, SourceDataset
from megatron.errors import DataError

_SMALL_BLEND = 255
_WIDE_BLEND = 32767
_COUNTED_AT_ONCE = 1 << 22


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


def blend_counts(sources: np.ndarray, count: int) -> tuple[int, ...]:
    """How many samples an order takes of each of `count` sources.

    Shapes:
        sources: [samples], what `blend_order` gave.
    """
    total = np.zeros(count, np.int64)
    for start in range(0, len(sources), _COUNTED_AT_ONCE):
        total += np.bincount(sources[start : start + _COUNTED_AT_ONCE], minlength=count)
    return tuple(int(number) for number in total)


class BlendedDataset:
    """Samples of several data sets in blended order.

    Args:
        sources, samples: what `blend_order` gave.
        firsts: at which of its samples each data set begins; 0 unless it was used before.
        places: what `source_of` calls each data set; its place in `datasets` unless given.

    Raises:
        DataError: the order asks a data set for more samples than it has.
    """

    def __init__(
        self,
        datasets: Sequence[SourceDataset],
        sources: np.ndarray,
        samples: np.ndarray,
        firsts: Sequence[int] | None = None,
        places: Sequence[int] | None = None,
    ) -> None:
        self.datasets = tuple(datasets)
        self._sources = sources
        self._samples = samples
        self._firsts = tuple(firsts) if firsts is not None else (0,) * len(self.datasets)
        self._places = tuple(places) if places is not None else tuple(range(len(self.datasets)))
        self.taken = blend_counts(sources, len(self.datasets))
        for dataset, first, count in zip(self.datasets, self._firsts, self.taken, strict=True):
            if first + count > len(dataset):
                raise DataError(
                    f"The blend takes {count} samples of {dataset.prefix}, which has {len(dataset) - first} planned."
                )

    def __len__(self) -> int:
        return len(self._sources)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1] of a sample."""
        return self.read(sample).tokens

    def read(self, sample: int) -> Sample:
        """Token ids, and which of them count as labels."""
        chosen, number = self._place(sample)
        return self.datasets[chosen].read(number)

    def source_of(self, sample: int) -> int:
        """Which source a sample comes from."""
        return self._places[int(self._sources[sample])]

    def locate(self, sample: int, position: int) -> str:
        """Where a token of a sample is stored, in words."""
        chosen, number = self._place(sample)
        return self.datasets[chosen].locate(number, position)

    def pieces(self, sample: int) -> list[Piece]:
        """What a sample is put together from, in the order of its tokens."""
        chosen, number = self._place(sample)
        return self.datasets[chosen].pieces(number)

    def _place(self, sample: int) -> tuple[int, int]:
        """The data set of a sample, and its number there."""
        chosen = int(self._sources[sample])
        return chosen, self._firsts[chosen] + int(self._samples[sample])


class PhasedDataset:
    """The samples of consecutive phases, each with a blend of its own.

    Args:
        firsts: the first sample of each phase.
        earlier: samples of the phases that are over, each numbered from 0; None for one that was not opened.
        newest: samples of the last phase, numbered from 0.
    """

    def __init__(
        self,
        firsts: Sequence[int],
        earlier: Sequence[SourceDataset | BlendedDataset | None],
        newest: SourceDataset | BlendedDataset,
    ) -> None:
        self.firsts = tuple(firsts)
        self.newest = newest
        self._phases = (*earlier, newest)

    def __len__(self) -> int:
        return self.firsts[-1] + len(self.newest)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1] of a sample."""
        return self.read(sample).tokens

    def read(self, sample: int) -> Sample:
        """Token ids, and which of them count as labels."""
        phase, number = self._place(sample)
        return phase.read(number)

    def source_of(self, sample: int) -> int:
        """Which source a sample comes from."""
        phase, number = self._place(sample)
        return phase.source_of(number)

    def locate(self, sample: int, position: int) -> str:
        """Where a token of a sample is stored, in words."""
        phase, number = self._place(sample)
        return phase.locate(number, position)

    def pieces(self, sample: int) -> list[Piece]:
        """What a sample is put together from, in the order of its tokens."""
        phase, number = self._place(sample)
        return phase.pieces(number)

    def _place(self, sample: int) -> tuple[SourceDataset | BlendedDataset, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"{len(self)} samples are planned; there is no sample {sample}.")
        number = bisect_right(self.firsts, sample) - 1
        phase = self._phases[number]
        if phase is None:
            raise DataError(
                f"Sample {sample} was consumed before the blend changed at sample {self.firsts[number + 1]}; the data "
                "of that time were not opened."
            )
        return phase, sample - self.firsts[number]
