"""Samples of `sequence length + 1` tokens from one token file, in planned order.

Source: bigscience Megatron-DeepSpeed `megatron/data/gpt_dataset.py` (`GPTDataset.__getitem__`).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from megatron.data.datasets.sample import DocumentSpan, Sample, SegmentedSamples
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.order.index_map import Indices
from megatron.errors import DataError


class GPTDataset(SegmentedSamples):
    """The samples of one source: consecutive segments, each in its own shuffled order.

    Args:
        indexed: the token file.
        segments: one set of index arrays per segment of the plan.
    """

    def __init__(self, indexed: IndexedDataset, sequence_length: int, segments: Sequence[Indices]) -> None:
        if indexed.dtype.kind not in "iu":
            raise DataError(f"{indexed.bin_path} holds {indexed.dtype.name} values; token ids must be integers.")
        self.indexed = indexed
        self.sequence_length = sequence_length
        self._segments = tuple(segments)
        super().__init__(indexed.prefix, (len(segment.shuffle) for segment in segments))

    def __getitem__(self, sample: int) -> np.ndarray:
        """Returns the token ids of a sample, int64 [s + 1].

        Raises:
            IndexError: the sample is out of range.
            DataError: the index refers to tokens outside the file.
        """
        try:
            spans = [self.indexed.get(*span) for span in self.spans(sample)]
        except IndexError as failure:
            if not 0 <= sample < len(self):
                raise
            raise DataError(
                f"The sample index of {self.prefix} is damaged: {failure} Delete the index cache."
            ) from failure
        tokens = np.concatenate([np.empty(0, np.int64), *spans], dtype=np.int64, casting="unsafe")
        if len(tokens) != self.sequence_length + 1:
            raise DataError(
                f"The sample index of {self.prefix} is damaged: sample {sample} has {len(tokens)} tokens, expected "
                f"{self.sequence_length + 1}. Delete the index cache."
            )
        return tokens

    def read(self, sample: int) -> Sample:
        return Sample(self[sample])

    def locate(self, sample: int, position: int) -> str:
        for sequence, offset, length in self.spans(sample):
            if position < length:
                token = offset + position
                address = int(self.indexed.pointers[sequence]) + token * self.indexed.dtype.itemsize
                return f"{self.indexed.bin_path}: token {token} of sequence {sequence} (byte offset {address})"
            position -= length
        raise IndexError(f"Position {self.sequence_length + 1 + position} is beyond the tokens of sample {sample}.")

    def spans(self, sample: int) -> list[DocumentSpan]:
        number, index = self._segment_of(sample)
        segment, spans = self._segments[number], []
        row = int(segment.shuffle[index])
        (first, offset), (last, end) = segment.sample[row : row + 2].tolist()
        for document, sequence in enumerate(segment.document[first : last + 1].tolist(), start=first):
            stop = end + 1 if document == last else int(self.indexed.lengths[sequence])
            spans.append(DocumentSpan(sequence, offset, stop - offset))
            offset = 0
        return spans
