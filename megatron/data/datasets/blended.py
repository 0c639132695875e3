"""Several datasets mixed by weight, and several such blends one after the other, where a run changed its blend."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

import numpy as np

from megatron.data.datasets.sample import SampleDataset, SampleRoute
from megatron.data.order.blend import blend_counts
from megatron.errors import DataError


class BlendedDataset(SampleRoute):
    """Samples of several datasets in blended order.

    Args:
        sources, samples: the result of `blend_order`.
        firsts: at which of its samples each dataset begins; 0 unless it was used before.
        places: the number that `source_of` returns for each dataset.

    Raises:
        DataError: the order asks a dataset for more samples than it has.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        sources: np.ndarray,
        samples: np.ndarray,
        firsts: Sequence[int],
        places: Sequence[int],
    ) -> None:
        self.datasets = tuple(datasets)
        self._sources = sources
        self._samples = samples
        self._firsts = tuple(firsts)
        self._places = tuple(places)
        self.taken = blend_counts(sources, len(self.datasets))
        for dataset, first, count in zip(self.datasets, self._firsts, self.taken, strict=True):
            if first + count > len(dataset):
                raise DataError(
                    f"The blend takes {count} samples of {dataset.prefix}, which has {len(dataset) - first} planned."
                )

    def __len__(self) -> int:
        return len(self._sources)

    def source_of(self, sample: int) -> int:
        return self._places[int(self._sources[sample])]

    def _place(self, sample: int) -> tuple[SampleDataset, int]:
        chosen = int(self._sources[sample])
        return self.datasets[chosen], self._firsts[chosen] + int(self._samples[sample])


class PhasedDataset(SampleRoute):
    """The samples of consecutive phases, each with a blend of its own.

    Args:
        firsts: the first sample of each phase.
        earlier: samples of the completed phases, each numbered from 0; None for one that was not opened.
        newest: samples of the last phase, numbered from 0.
    """

    def __init__(
        self,
        firsts: Sequence[int],
        earlier: Sequence[SampleDataset | BlendedDataset | None],
        newest: SampleDataset | BlendedDataset,
    ) -> None:
        self.firsts = tuple(firsts)
        self.newest = newest
        self._phases = (*earlier, newest)

    def __len__(self) -> int:
        return self.firsts[-1] + len(self.newest)

    def _place(self, sample: int) -> tuple[SampleDataset, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"{len(self)} samples are planned; there is no sample {sample}.")
        number = bisect_right(self.firsts, sample) - 1
        phase = self._phases[number]
        if phase is None:
            raise DataError(
                f"Sample {sample} was consumed before the blend changed at sample {self.firsts[number + 1]}; the data "
                f"of that phase were not opened."
            )
        return phase, sample - self.firsts[number]
