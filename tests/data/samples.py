"""Datasets of given rows, and the micro-batches of datasets."""

from typing import Any

import numpy as np

from megatron.data.datasets.sample import DocumentSpan, Sample
from megatron.data.loader import Batch, MicroBatches


class GivenRows:
    """Samples that are the given rows; `read_numbers` lists those that were read."""

    def __init__(self, rows: Any, loss_mask: np.ndarray | None = None, prefix: str = "row") -> None:
        self.rows = np.array(rows, np.int64)
        self.loss_mask = loss_mask
        self.prefix = prefix
        self.read_numbers: list[int] = []

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, sample: int) -> np.ndarray:
        return self.read(sample).tokens

    def read(self, sample: int) -> Sample:
        self.read_numbers.append(sample)
        return Sample(self.rows[sample], self.loss_mask)

    def source_of(self, sample: int) -> int:
        return sample % 3

    def locate(self, sample: int, position: int) -> str:
        return f"{self.prefix} {sample} column {position}"

    def spans(self, sample: int) -> list[DocumentSpan]:
        return [DocumentSpan(sample, 0, self.rows.shape[1])]


def micro_batches(dataset: Any, size: int, micro: int, first: int = 0, **options: Any) -> MicroBatches:
    """The micro-batches of a global batch of `size` samples."""
    return MicroBatches(dataset, first_sample=first, global_batch_size=size, micro_batch_size=micro, **options)


def batches_of_ranks(dataset: Any, ranks: int, size: int, micro: int, first: int = 0, **options: Any) -> list[Batch]:
    """The micro-batches of all data-parallel ranks in the order of their samples."""
    each = [micro_batches(dataset, size, micro, first, dp_rank=rank, dp_size=ranks, **options) for rank in range(ranks)]
    return [batch for step in zip(*each, strict=True) for batch in step]
