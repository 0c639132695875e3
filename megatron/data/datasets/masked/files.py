"""Token files as sources of masked samples; their length is their number of documents, by which they are split."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from megatron.config.objective.masking import SENTENCES, STREAM
from megatron.data.datasets.masked.options import MaskedOptions
from megatron.data.datasets.masked.sentences import SentenceFile
from megatron.data.datasets.masked.texts import MaskedRows, TextRows
from megatron.data.datasets.masked.vocabulary import MaskedVocabulary
from megatron.data.datasets.sample import SourceDataset
from megatron.data.formats.indexed import IndexedDataset
from megatron.data.order.index_cache import IndexCache
from megatron.errors import ConfigError, DataError
from megatron.tokenizers.tokenizer import Tokenizer


class TextFile:
    """A token file whose documents are text, whatever sequences they consist of.

    Args:
        runs_on: whether text runs on over documents, which else are a row each.
    """

    def __init__(
        self, indexed: IndexedDataset, sequence_length: int, vocabulary: MaskedVocabulary, *, runs_on: bool
    ) -> None:
        self.indexed = indexed
        self._sequence_length = sequence_length
        self._vocabulary = vocabulary
        self._make = TextRows.of_stream if runs_on else TextRows.of_documents

    @property
    def prefix(self) -> str:
        """The data prefix."""
        return self.indexed.prefix

    @property
    def fingerprint(self) -> str:
        """That of the token file."""
        return self.indexed.fingerprint

    def __len__(self) -> int:
        return len(self.indexed.documents) - 1

    def rows(self, first: int, last: int) -> TextRows:
        """The rows that the documents [first, last) fill.

        Raises:
            DataError: they hold no tokens.
        """
        return self._make(self.indexed, first, last, self._sequence_length, self._vocabulary)


class MaskedFiles:
    """What masked samples are made of and with.

    Args:
        sequence_length: tokens of a sample.
        seed: of the run; what is hidden follows from it.
        cache: where the index arrays of a prefix are kept.

    Raises:
        ConfigError: the tokenizer lacks a token, or samples are too short.
    """

    def __init__(
        self,
        options: MaskedOptions,
        sequence_length: int,
        seed: int,
        tokenizer: Tokenizer | None,
        cache: Callable[[str], IndexCache],
    ) -> None:
        if tokenizer is None:
            raise ConfigError("Masked samples need a tokenizer, whose mask token they show (--tokenizer-type).")
        self._options = options
        self._sequence_length = sequence_length
        self._seed = seed
        self._cache = cache
        self._kind = options.masking.masked_samples
        self._vocabulary = MaskedVocabulary.of(tokenizer, needs_all=self._kind == SENTENCES)
        options.predictions(sequence_length)

    def open(self, indexed: IndexedDataset) -> SentenceFile | TextFile:
        """The documents of a token file.

        Raises:
            DataError: samples of sentences are to be made, and no document has two.
        """
        if self._kind != SENTENCES:
            return TextFile(indexed, self._sequence_length, self._vocabulary, runs_on=self._kind == STREAM)
        if self._options.pairs and int(np.diff(indexed.documents).max(initial=0)) < 2:
            raise DataError(
                f"{indexed.prefix} has no document of two sentences, so no sentence pairs can be made of it. If it "
                "was not split into sentences, preprocess it with --split-sentences and name the files that end in "
                "_sentence; otherwise give --bert-no-binary-head, or --masked-samples stream."
            )
        return SentenceFile(
            indexed, self._sequence_length, self._options, self._vocabulary, self._cache(indexed.prefix)
        )

    def masked(self, rows: SourceDataset) -> MaskedRows:
        """Samples of rows, with hidden tokens."""
        return MaskedRows(rows, self._seed, self._sequence_length, self._options, self._vocabulary)
