"""Datasets that transform the samples of another one: with prefixes, shortened, or with prompts as answers."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np

from megatron.data.datasets.examples.example_rows import ExampleRows
from megatron.data.datasets.sample import ChangedSamples, DocumentSpan, Sample, SampleDataset


@dataclass(frozen=True)
class PrefixDataset(ChangedSamples):
    """The samples of a dataset, each with one prefix or with a prefix in each of its documents.

    A prefix has at least one token. The prefix of a sample may span the whole sample; the prefix of a document excludes
    its end-of-document token. The length is a hash of the seed, the sample's index and the document's index in the
    sample, so it is the same on every rank, after a resume and in every evaluation.

    Args:
        eod_id: the end-of-document token for a prefix in each document; None for one prefix per sample.
        on_targets_only: no loss on labels inside a prefix; its last token predicts the first token after it, which
            has a loss.

    Source: bigscience Megatron-DeepSpeed `megatron/utils.py` (`get_prefix_indices`,
    `get_ltor_masks_and_position_ids`), which draws the lengths separately on every pipeline stage.
    """

    dataset: SampleDataset
    seed: int
    eod_id: int | None = None
    on_targets_only: bool = False

    def read(self, sample: int) -> Sample:
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

    def _documents(self, tokens: np.ndarray) -> list[tuple[int, int]]:
        """Returns the start of each document and the last possible end of its prefix. Shapes: tokens [s]."""
        if self.eod_id is None:
            return [(0, len(tokens))]
        ends = np.flatnonzero(tokens == self.eod_id).tolist()
        firsts = [0, *(end + 1 for end in ends)]
        return [pair for pair in zip(firsts, [*ends, len(tokens)], strict=True) if pair[0] < len(tokens)]


def prefix_length(longest: int, seed: int, sample: int, document: int) -> int:
    """Returns a length from 1 to `longest`, uniformly distributed; 1 for a document of one end-of-document token."""
    digest = hashlib.blake2b(f"prefix of document {document} in sample {sample}, seed {seed}".encode(), digest_size=8)
    return 1 + (int.from_bytes(digest.digest(), "little") * max(longest, 1) >> 64)


@dataclass(frozen=True)
class ShortenedDataset(ChangedSamples):
    """The samples of a dataset, truncated to their first `length` inputs; the last label is the next token."""

    dataset: SampleDataset
    length: int

    def read(self, sample: int) -> Sample:
        read = self.dataset.read(sample)
        whole = read._asdict()
        cut: dict[str, Any] = {
            name: part[: self.length] for name, part in whole.items() if isinstance(part, np.ndarray)
        }
        if read.labels is None:
            cut["tokens"] = read.tokens[: self.length + 1]
        return read._replace(**cut)

    def spans(self, sample: int) -> list[DocumentSpan]:
        left, spans = len(self[sample]), []
        for span in self.dataset.spans(sample):
            if left > 0:
                spans.append(span._replace(tokens=min(left, span.tokens)))
            left -= span.tokens
        return spans


@dataclass(frozen=True)
class CopiedPrompts(ChangedSamples):
    """Samples of examples, some with the answer replaced by the prompt.

    A chatbot that sometimes repeats its prompt stays close to its pretraining text. The choice is a hash of seed and
    sample index, so it is the same on every rank and after a resume, and differs between epochs.

    Args:
        copies: the same rows with the answers replaced.
        probability: share of the samples read from `copies`.

    Source: jisngprk/dsGPT2, `--alpha`.
    """

    dataset: SampleDataset
    copies: ExampleRows
    probability: float
    seed: int

    def read(self, sample: int) -> Sample:
        if not is_copied(self.probability, self.seed, sample):
            return self.dataset.read(sample)
        (span,) = self.dataset.spans(sample)
        tokens, *masks = (part[0] for part in self.copies.read(np.array([span.sequence])))
        return Sample(tokens, *masks)


def is_copied(probability: float, seed: int, sample: int) -> bool:
    """Returns True if the answers of a sample are replaced."""
    digest = hashlib.blake2b(f"copied prompt of sample {sample}, seed {seed}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") < probability * 2.0**64
