"""Samples with a random prefix, whose tokens attend to each other in both directions."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from megatron.data.datasets.sample import Sample, SampleDataset, SampleRoute


@dataclass(frozen=True)
class PrefixDataset(SampleRoute):
    """The samples of a data set, each with a prefix, or with one in each of its documents.

    A prefix is at least one token long; the prefix of a whole sample may be as long as the sample, and the prefix of a
    document leaves out its end-of-document token. Its length is a hash of the seed, the sample's number and the
    document's number in the sample, so it is the same on every rank and after a resume, and evaluation always has the
    same ones.

    Args:
        eod_id: the token that ends a document, if each document is to have a prefix of its own; None for one prefix per
            sample.
        on_targets_only: whether labels inside a prefix do not count; the last token of a prefix predicts the first
            token after it, which does.

    Source: bigscience Megatron-DeepSpeed `megatron/utils.py` (`get_prefix_indices`,
    `get_ltor_masks_and_position_ids`), which draws the lengths anew on every pipeline stage.
    """

    dataset: SampleDataset
    seed: int
    eod_id: int | None = None
    on_targets_only: bool = False

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, sample: int) -> np.ndarray:
        """Token ids int64 [s + 1]."""
        return self.dataset[sample]

    def read(self, sample: int) -> Sample:
        """A sample, its prefixes, and which of its labels count."""
        read = self.dataset.read(sample)
        tokens = read.tokens[:-1]
        prefix_mask = np.zeros(len(tokens), np.bool_)
        is_counted = np.ones(len(tokens), np.bool_)
        for number, (first, last) in enumerate(self._documents(tokens)):
            end = first + prefix_length(last - first, self.seed, sample, number)
            prefix_mask[first:end] = True
            is_counted[first : end - 1] = False
        loss_mask = read.loss_mask
        if self.on_targets_only:
            loss_mask = is_counted if loss_mask is None else loss_mask * is_counted
        return read._replace(loss_mask=loss_mask, prefix_mask=prefix_mask)

    def _place(self, sample: int) -> tuple[SampleDataset, int]:
        return self.dataset, sample

    def _documents(self, tokens: np.ndarray) -> list[tuple[int, int]]:
        """Where each document begins, and the furthest that its prefix may end.

        Shapes: tokens `[s]`.
        """
        if self.eod_id is None:
            return [(0, len(tokens))]
        ends = np.flatnonzero(tokens == self.eod_id).tolist()
        firsts = [0, *(end + 1 for end in ends)]
        return [pair for pair in zip(firsts, [*ends, len(tokens)], strict=True) if pair[0] < len(tokens)]


def prefix_length(longest: int, seed: int, sample: int, document: int) -> int:
    """A length from 1 to `longest`, each equally likely; 1 for a document that is only an end-of-document token."""
    digest = hashlib.blake2b(f"prefix of document {document} in sample {sample}, seed {seed}".encode(), digest_size=8)
    return 1 + (int.from_bytes(digest.digest(), "little") * max(longest, 1) >> 64)
