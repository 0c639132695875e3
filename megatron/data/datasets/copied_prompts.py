"""Samples whose answers are, at random, replaced by the prompts they answer.

Source: jisngprk/dsGPT2, `--alpha`: a chatbot that now and then repeats what it was told stays close to the text it was
pretrained on.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from megatron.data.datasets.examples.rows import ExampleRows
from megatron.data.datasets.sample import Sample, SampleDataset, SampleRoute, SourceDataset


@dataclass(frozen=True)
class CopiedPrompts(SampleRoute):
    """The samples of a source of examples, some of which are read from a copy where prompts take the place of answers.

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

    def read(self, sample: int) -> Sample:
        """A sample and which of its labels count."""
        if not is_copied(self.probability, self.seed, sample):
            return self.dataset.read(sample)
        (span,) = self.dataset.spans(sample)
        tokens, *masks = (part[0] for part in self.copies.read(np.array([span.sequence])))
        return Sample(tokens, *masks)

    def _place(self, sample: int) -> tuple[SampleDataset, int]:
        return self.dataset, sample


def is_copied(probability: float, seed: int, sample: int) -> bool:
    """Whether a sample is one of those whose answers are replaced."""
    digest = hashlib.blake2b(f"copied prompt of sample {sample}, seed {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < probability * 2.0**64
