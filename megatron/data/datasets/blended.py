"""Datasets mixed by weight, and consecutive blends of a run whose blend was changed."""

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
        firsts: first sample used of each dataset; 0 unless an earlier phase used it.
        source_ids: the index that `source_of` returns for each dataset.

    Raises:
        DataError: the order requests more samples from a dataset than it has.
    """

    def __init__(
        self,
        datasets: Sequence[SampleDataset],
        sources: np.ndarray,
        samples: np.ndarray,
        firsts: Sequence[int],
        source_ids: Sequence[int],
    ) -> None:
        self.datasets = tuple(datasets)
        self._sources = sources
        self._samples = samples
        self._firsts = tuple(firsts)
        self._source_ids = tuple(source_ids)
        self.taken = blend_counts(sources, len(self.datasets))
        for dataset, first, count in zip(self.datasets, self._firsts, self.taken, strict=True):
            if first + count > len(dataset):
                raise DataError(
                    f"The blend needs {count} samples of {dataset.prefix}, which has {len(dataset) - first} planned."
                )

    def __len__(self) -> int:
        return len(self._sources)

    def source_of(self, sample: int) -> int:
        return self._source_ids[int(self._sources[sample])]

    def _route(self, sample: int) -> tuple[SampleDataset, int]:
        chosen = int(self._sources[sample])
        return self.datasets[chosen], self._firsts[chosen] + int(self._samples[sample])


class PhasedDataset(SampleRoute):
    """The samples of consecutive phases, each with its own blend.

    Args:
        firsts: the first sample of each phase.
        earlier: datasets of the completed phases, each indexed from 0; None for one that was not opened.
        newest: dataset of the last phase, indexed from 0.
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

    def _route(self, sample: int) -> tuple[SampleDataset, int]:
        if not 0 <= sample < len(self):
            raise IndexError(f"Sample {sample} is out of range: {len(self)} samples are planned.")
        number = bisect_right(self.firsts, sample) - 1
        phase = self._phases[number]
        if phase is None:
            raise DataError(
                f"Sample {sample} was consumed before the blend changed at sample {self.firsts[number + 1]}; the data "
                f"of that phase is not open."
            )
        return phase, sample - self.firsts[number]
