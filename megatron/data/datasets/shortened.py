"""The first tokens of each sample, for a curriculum by length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.datasets.sample import DocumentSpan, Sample, SampleDataset, SampleRoute


@dataclass(frozen=True)
class ShortenedDataset(SampleRoute):
    """The samples of a data set without what follows their first `length` inputs; the last label is the token after
    them.
    """

    dataset: SampleDataset
    length: int

    def __len__(self) -> int:
        return len(self.dataset)

    def read(self, sample: int) -> Sample:
        """The beginning of a sample."""
        read = self.dataset.read(sample)
        whole = read._asdict()
        cut: dict[str, Any] = {
            name: part[: self.length] for name, part in whole.items() if isinstance(part, np.ndarray)
        }
        if read.labels is None:
            cut["tokens"] = read.tokens[: self.length + 1]
        return read._replace(**cut)

    def _place(self, sample: int) -> tuple[SampleDataset, int]:
        return self.dataset, sample

    def spans(self, sample: int) -> list[DocumentSpan]:
        """The stretches of documents that make up the beginning of a sample, in the order of its tokens."""
        left, spans = len(self[sample]), []
        for span in self.dataset.spans(sample):
            if left > 0:
                spans.append(span._replace(tokens=min(left, span.tokens)))
            left -= span.tokens
        return spans
