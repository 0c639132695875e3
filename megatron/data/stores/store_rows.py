"""Documents of a store as training rows, fetched and encoded on the fly without preprocessing.

A row holds the ids that preprocessing with `--append-eod` gives a document, truncated or padded to the sample's length.
The rest of a long document is never seen, and padding costs time: the price of having no token files.

Source: jisngprk/dsGPT2 trains on its MongoDB collections this way.
"""

from __future__ import annotations

import hashlib
import threading
from functools import cached_property

import numpy as np
import numpy.typing as npt

from megatron import log
from megatron.data.order.row_order import RowSource
from megatron.data.stores.document_store import DocumentStore, open_store
from megatron.errors import DataError
from megatron.secret_text import masked
from megatron.tokenizers.tokenizer import Tokenizer

_SAMPLED_DOCUMENTS = 64
_BLOCK_DOCUMENTS = 64


class DocumentEncoder:
    """Turns texts into samples; safe to use from several threads.

    Args:
        sequence_length: inputs of a sample.
        lock: held while a text is encoded; a new one by default.

    Raises:
        ConfigError: the tokenizer has no end-of-document token.
    """

    def __init__(self, tokenizer: Tokenizer, sequence_length: int, lock: threading.Lock | None = None) -> None:
        self.length = sequence_length + 1
        self._tokenizer = tokenizer
        self._eod_id = tokenizer.eod_id
        self._lock = lock or threading.Lock()

    def encode(self, text: str) -> tuple[npt.NDArray[np.int64], int]:
        """Returns the sample of a text, [s + 1], padded with end-of-document, and the text's length with its end."""
        sample = np.full(self.length, self._eod_id, np.int64)
        with self._lock:
            ids, _ = self._tokenizer.encode_flat([text])
            sample[: len(ids)] = ids[: self.length]
        return sample, len(ids) + 1


class StoreRows(RowSource):
    """The documents of a store.

    Args:
        prefix: address of the store, or path of its configuration file.

    Raises:
        ConfigError: the address cannot be read, or a driver is missing.
        DataError: the store is empty or damaged.
        StorageError: the database cannot be reached.
    """

    def __init__(self, prefix: str, encoder: DocumentEncoder) -> None:
        self.prefix = masked(prefix)
        self._store = open_store(prefix)
        self._encoder = encoder
        self._has_warned = False
        self._warn_of_long_documents()

    @cached_property
    def fingerprint(self) -> str:  # type: ignore[override]
        return store_fingerprint(self._store)

    def __len__(self) -> int:
        return len(self._store)

    def blocks(self, first: int, last: int) -> npt.NDArray[np.int64]:
        """Returns blocks of 64 documents: every document is fetched equally fast, but databases read whole pages."""
        return np.append(np.arange(first, last, _BLOCK_DOCUMENTS), last)

    def read(self, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.bool_]]:
        tokens = np.empty((len(rows), self._encoder.length), np.int64)
        mask = np.empty((len(rows), self._encoder.length - 1), np.bool_)
        for index, row in enumerate(rows.tolist()):
            tokens[index], count = self._encoder.encode(self._store.fetch(row))
            mask[index] = np.arange(1, self._encoder.length) < count
            if count > self._encoder.length and not self._has_warned:
                self._warn(f"document {row} of {self.prefix} has {count} tokens")
        return tokens, mask

    def locate(self, row: int, position: int) -> str:
        return f"{self.prefix}: token {position} of document {row}"

    def _warn_of_long_documents(self) -> None:
        counts = np.array([self._encoder.encode(text)[1] for text in sampled_texts(self._store)])
        kept = np.minimum(counts, self._encoder.length)
        if (counts > kept).any():
            self._warn(
                f"{self.prefix}: {int((counts > kept).sum())} of {len(counts)} sampled documents are longer than "
                f"{self._encoder.length} tokens, and {1 - kept.sum() / counts.sum():.0%} of all tokens are cut off"
            )

    def _warn(self, finding: str) -> None:
        self._has_warned = True
        log.shared_warning(
            f"{finding}. Training sees only the first {self._encoder.length} tokens of each document; to train on all, "
            "convert the store to token files (tools/preprocess_data.py --input)."
        )


def store_fingerprint(store: DocumentStore) -> str:
    """Returns the SHA-256 over the number of documents and a sample of texts, independent of the database."""
    digest = hashlib.sha256(str(len(store)).encode())
    for text in sampled_texts(store):
        digest.update(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest())
    return digest.hexdigest()


def sampled_texts(store: DocumentStore) -> list[str]:
    """Returns some documents, evenly spaced from the first to the last.

    Raises:
        DataError: the store is empty.
    """
    if not len(store):
        raise DataError(f"{store.shown} holds no documents. Import some with tools/corpus/corpus_store.py.")
    documents = np.linspace(0, len(store) - 1, min(len(store), _SAMPLED_DOCUMENTS)).astype(int)
    return [store.fetch(document) for document in documents.tolist()]
