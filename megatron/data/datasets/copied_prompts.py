"""Samples whose answers are, at random, replaced by the prompts they answer.

Source: jisngprk/dsGPT2, `--alpha`: a chatbot that now and then repeats what it was told stays close to the text it was
pretrained on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from megatron.data.datasets.examples.rows import ExampleRows
from megatron.data.datasets.sample import DocumentSpan, Sample, SourceDataset


@dataclass(frozen=True)
class CopiedPrompts:
    """The samples of a source of examples, some of which are read from a copy where prompts stand as answers.

    Which samples is a hash of the seed and the sample's number, so it is the same on every rank and after a resume, and
    another epoch copies others.

    Args:
        copies: the same rows with the answers replaced.
        probability: share of the samples that are read from there.
    """

    dataset: SourceDataset
    copies: ExampleRows
    probability: float
    seed: int

    @property
    def prefix(self) -> str:
        """The source as the user named it."""
        return self.dataset.prefix

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1]."""
        return self.read(sample).tokens

    def read(self, sample: int) -> Sample:
        """A sample and which of its labels count."""
        if not is_copied(self.probability, self.seed, sample):
            return self.dataset.read(sample)
        (span,) = self.dataset.spans(sample)
        tokens, *masks = (part[0] for part in self.copies.read(np.array([span.sequence])))
        return Sample(tokens, *masks)

    def source_of(self, sample: int) -> int:
        """Which source of its group a sample comes from: there is only this one."""
        return self.dataset.source_of(sample)

    def locate(self, sample: int, position: int) -> str:
        """Describes where a token of a sample is stored."""
        return self.dataset.locate(sample, position)

    def spans(self, sample: int) -> list[DocumentSpan]:
        """The one row that is the sample."""
        return self.dataset.spans(sample)


def is_copied(probability: float, seed: int, sample: int) -> bool:
    """Whether a sample is one of those whose answers are replaced."""
    digest = hashlib.blake2b(f"copied prompt of sample {sample}, seed {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < probability * 2.0**64
