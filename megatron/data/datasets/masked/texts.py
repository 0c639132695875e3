"""Rows of plain text for masked samples: one document per row, or a stream that crosses documents.

Every row starts with the class token, ends with the separator, and is padded.
"""

from __future__ import annotations

import hashlib

import numpy as np

from megatron.data.datasets.masked.masked_options import MaskedOptions
from megatron.data.datasets.masked.masking import mask_tokens, sample_numbers
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from megatron.data.datasets.sample import ChangedSamples, Sample, SampleDataset
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.order.row_order import RowSource
from megatron.errors import DataError

_EDGES = 2  # class token and separator


class TextRows(RowSource):
    """Ranges of a token file as rows.

    Args:
        starts: first token of each row, counted from the beginning of the file, int64 [n].
        ends: one past the last token, int64 [n].
    """

    def __init__(
        self,
        indexed: IndexedDataset,
        starts: np.ndarray,
        ends: np.ndarray,
        sequence_length: int,
        vocabulary: MaskedVocabulary,
        fingerprint: str,
    ) -> None:
        self.prefix = indexed.prefix
        self.fingerprint = fingerprint
        self._indexed = indexed
        self._starts = starts
        self._ends = ends
        self._length = sequence_length
        self._vocabulary = vocabulary

    @staticmethod
    def of_documents(
        indexed: IndexedDataset, first: int, last: int, sequence_length: int, vocabulary: MaskedVocabulary
    ) -> TextRows:
        """Returns the documents [first, last), each truncated to a row."""
        bounds = _token_offsets(indexed, first, last)
        fingerprint = _fingerprint(indexed, "documents", first, last, sequence_length)
        return TextRows(indexed, bounds[:-1], bounds[1:], sequence_length, vocabulary, fingerprint)

    @staticmethod
    def of_stream(
        indexed: IndexedDataset, first: int, last: int, sequence_length: int, vocabulary: MaskedVocabulary
    ) -> TextRows:
        """Returns the documents [first, last), laid end to end and cut into rows; the last one is padded."""
        bounds = _token_offsets(indexed, first, last)
        starts = np.arange(bounds[0], bounds[-1], sequence_length - _EDGES)
        fingerprint = _fingerprint(indexed, "stream", first, last, sequence_length)
        ends = np.append(starts[1:], bounds[-1])
        return TextRows(indexed, starts, ends, sequence_length, vocabulary, fingerprint)

    def __len__(self) -> int:
        return len(self._starts)

    def read(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Reads rows.

        Shapes:
            as in `RowSource`, except for tokens int64 [n, s] and, instead of a loss mask, a mask of the text tokens.
        """
        tokens = np.full((len(rows), self._length), self._vocabulary.pad_id, np.int64)
        is_text, segments = np.zeros(tokens.shape, np.bool_), np.ones(tokens.shape, np.int64)
        for index, row in enumerate(rows.tolist()):
            text = self._text(row)
            end = 1 + len(text)
            tokens[index, 0], tokens[index, 1:end], tokens[index, end] = (
                self._vocabulary.cls_id,
                text,
                self._vocabulary.sep_id,
            )
            is_text[index, 1:end] = True
            segments[index, : end + 1] = 0
        return tokens, is_text, segments

    def locate(self, row: int, position: int) -> str:
        token = int(self._starts[row] + self._leading_specials(row)) + position - 1
        offset = token * self._indexed.dtype.itemsize
        return f"{self._indexed.bin_path}: token {token} of the file (byte offset {offset})"

    def _text(self, row: int) -> np.ndarray:
        """Returns the tokens of a row without special tokens that the tokenizer added around them."""
        first = int(self._starts[row])
        front = self._leading_specials(row)
        count = min(int(self._ends[row]) - first - front, self._length - _EDGES + 1)
        text = self._tokens_at(first + front, max(count, 0))
        if len(text) and text[-1] in (self._vocabulary.sep_id, self._vocabulary.eod_id):
            text = text[:-1]
        return text[: self._length - _EDGES]

    def _leading_specials(self, row: int) -> int:
        first = int(self._starts[row])
        return int(first < self._ends[row] and self._tokens_at(first, 1)[0] == self._vocabulary.cls_id)

    def _tokens_at(self, first: int, count: int) -> np.ndarray:
        return self._indexed.tokens_at(first * self._indexed.dtype.itemsize, count)


class MaskedRows(ChangedSamples):
    """Rows with masked tokens, masked differently each time a row is repeated.

    Args:
        dataset: samples with a mask of the text tokens instead of a loss mask.
    """

    def __init__(
        self,
        dataset: SampleDataset,
        seed: int,
        sequence_length: int,
        options: MaskedOptions,
        vocabulary: MaskedVocabulary,
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._options = options
        self._most = options.predictions(sequence_length)
        self._vocabulary = vocabulary

    def read(self, sample: int) -> Sample:
        row = self.dataset.read(sample)
        if row.loss_mask is None:
            raise DataError(f"Sample {sample} of {self.prefix} has no mask of its text tokens.")
        self._vocabulary.check_ids(row.tokens, lambda position: self.locate(sample, position))
        numbers = sample_numbers(self._seed, sample, len(row.tokens))
        inputs, is_masked = mask_tokens(
            row.tokens, row.loss_mask, self._most, self._options.masking, self._vocabulary, numbers
        )
        types = np.zeros(len(inputs), np.int64)
        return Sample(inputs, is_masked, row.segment_ids, labels=row.tokens, token_types=types)


def _token_offsets(indexed: IndexedDataset, first: int, last: int) -> np.ndarray:
    """Returns the starts of the documents [first, last) in tokens, then the end of the last one, int64 [n + 1]."""
    ends = np.append(indexed.pointers, indexed.tokens * indexed.dtype.itemsize)
    return ends[indexed.documents[first : last + 1]].astype(np.int64) // indexed.dtype.itemsize


def _fingerprint(indexed: IndexedDataset, *what: object) -> str:
    return hashlib.sha256(f"{indexed.fingerprint} {what}".encode()).hexdigest()
