"""How long the documents of a store are in tokens: what a sample length cuts off, before training finds out.

Source: dsGPT2's `statistics.py`, which counts in bins of ten tokens up to 130.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megatron.data.stores.document_store import DocumentStore
from megatron.errors import DataError
from megatron.tokenizers.tokenizer import Tokenizer

_DOCUMENTS_AT_ONCE = 1024


@dataclass(frozen=True)
class LengthHistogram:
    """Documents by their number of tokens, without the token that ends a document.

    Attributes:
        width: tokens of a bin.
        counts: documents of each bin; the last counts all that are longer.
        tokens: of all documents.
        longest: tokens of the longest document.
    """

    width: int
    counts: tuple[int, ...]
    tokens: int
    longest: int

    @property
    def documents(self) -> int:
        """Number of documents."""
        return sum(self.counts)

    def lines(self) -> Iterator[str]:
        """A line for each bin, then the mean and the longest."""
        last = len(self.counts) - 1
        for number, count in enumerate(self.counts):
            first = number * self.width
            tokens = f"{first} and more" if number == last else f"{first} to {first + self.width - 1}"
            yield f"{tokens:>12} tokens: {count:10d} documents ({count / self.documents:6.2%})"
        yield (
            f"{self.documents} documents, {self.tokens} tokens, {self.tokens / self.documents:.1f} in the mean, "
            f"{self.longest} in the longest"
        )


def length_histogram(store: DocumentStore, tokenizer: Tokenizer, width: int, most: int) -> LengthHistogram:
    """Counts all documents in constant memory.

    Args:
        width: tokens of a bin.
        most: documents of at least this many tokens share the last bin.

    Raises:
        DataError: there are none.
    """
    if not len(store):
        raise DataError(f"{store.shown} holds no documents to count. Import some with tools/corpus/corpus_store.py.")
    counts = np.zeros(-(-most // width) + 1, np.int64)
    tokens = longest = 0
    for first in range(0, len(store), _DOCUMENTS_AT_ONCE):
        texts = store.fetch_many(range(first, min(first + _DOCUMENTS_AT_ONCE, len(store))))
        lengths = np.asarray(tokenizer.encode_flat(texts)[1], np.int64)
        counts += np.bincount(np.minimum(lengths // width, len(counts) - 1), minlength=len(counts))
        tokens += int(lengths.sum())
        longest = max(longest, int(lengths.max()))
    return LengthHistogram(width, tuple(counts.tolist()), tokens, longest)
