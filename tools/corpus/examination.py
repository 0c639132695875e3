"""Examines a pair of token files: counts, lengths, ids outside the vocabulary, duplicate documents.

Memory: eight bytes per document, and a few megabytes of tokens at a time.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.sidecar import read_sidecar
from megatron.errors import DataError

_CHUNK_TOKENS = 1 << 22
_SHOWN = 5
_BAR_WIDTH = 40
_HASH_BYTES = 8


@dataclass
class Examination:
    """Statistics of a pair of token files.

    Args:
        vocab_size: upper bound of ids; None if unknown.
        histogram: (minimum length, documents) per bin of lengths in tokens: 0, 1, 2 to 3, 4 to 7, ...
        out_of_range: number of ids outside the vocabulary; `first_out_of_range` describes the first.
        duplicates: documents equal to an earlier one; `shown_duplicates` are pairs (earlier, later).
    """

    prefix: str
    dtype: str
    sequences: int
    documents: int
    tokens: int
    vocab_size: int | None
    empty: int = 0
    shortest: int = 0
    median: float = 0.0
    longest: int = 0
    histogram: list[tuple[int, int]] = field(default_factory=list)
    out_of_range: int = 0
    first_out_of_range: str = ""
    duplicates: int = 0
    shown_duplicates: list[tuple[int, int]] = field(default_factory=list)


def examine(prefix: str, vocab_size: int | None = None) -> Examination:
    """Reads a pair from end to end.

    Args:
        vocab_size: the tokenizer's; the sidecar's if None.

    Raises:
        DataError: the pair is damaged, or its sidecar belongs to another pair.
    """
    dataset = IndexedDataset(prefix)
    sidecar = read_sidecar(prefix)
    if sidecar is not None:
        if dataset.counts != sidecar.counts:
            present = "{}, {} and {}".format(*dataset.counts)
            raise DataError(
                f"{prefix}.json lists {sidecar.sequences} sequences, {sidecar.documents} documents and "
                f"{sidecar.tokens} tokens; the pair has {present}. One is of another run: preprocess the corpus again, "
                "or remove the .json."
            )
        vocab_size = sidecar.tokenizer.vocab_size if vocab_size is None else vocab_size
    result = Examination(prefix, dataset.dtype.name, *dataset.counts, vocab_size)
    _lengths(dataset, result)
    _tokens(dataset, result)
    return result


def report(pair: Examination) -> list[str]:
    """The examination as lines of text."""
    lines = [
        f"{pair.prefix}: {pair.documents} documents, {pair.sequences} sequences, {pair.tokens} tokens of "
        f"{pair.dtype}; tokens per document: least {pair.shortest}, median {pair.median:g}, most {pair.longest}"
    ]
    most = max((count for _, count in pair.histogram), default=0)
    for index, (least, count) in enumerate(pair.histogram):
        bar = "#" * -(-count * _BAR_WIDTH // most) if most else ""
        bin_text = str(least) if least < 2 else f"{least}-{2 * least - 1}"
        if index == 0:
            lines.append("  tokens per document")
        lines.append(f"  {bin_text:>21} |{bar:<{_BAR_WIDTH}} {count}")
    if pair.vocab_size is None:
        lines.append("  ids: the size of the vocabulary is unknown (no sidecar and no tokenizer), so not checked")
    elif pair.out_of_range:
        lines.append(
            f"  ids: {pair.out_of_range} lie outside of 0 to {pair.vocab_size - 1}, the first at "
            f"{pair.first_out_of_range}"
        )
    else:
        lines.append(f"  ids: all in 0 to {pair.vocab_size - 1}")
    pairs = ", ".join(f"{later} (as {earlier})" for earlier, later in pair.shown_duplicates)
    more = ", ..." if pair.duplicates > len(pair.shown_duplicates) else ""
    lines.append(f"  duplicates: {pair.duplicates} documents{f': {pairs}{more}' if pairs else ''}")
    return lines


def sample_documents(dataset: IndexedDataset, count: int) -> Iterator[tuple[int, np.ndarray]]:
    """Evenly spaced documents: their numbers and at most `_CHUNK_TOKENS` of their ids."""
    total = len(dataset.documents) - 1
    shown = min(count, total)
    for number in [total * index // shown for index in range(shown)]:
        first, last = int(dataset.documents[number]), int(dataset.documents[number + 1])
        chunks = [
            dataset.get(sequence, 0, min(int(dataset.lengths[sequence]), _CHUNK_TOKENS))
            for sequence in range(first, min(last, first + 100))
        ]
        yield number, np.concatenate(chunks) if chunks else np.empty(0, dataset.dtype)


def _lengths(dataset: IndexedDataset, result: Examination) -> None:
    """Computes the tokens of each document from the index."""
    ends = np.concatenate([[0], np.cumsum(dataset.lengths, dtype=np.int64)])[dataset.documents]
    lengths = np.diff(ends)
    if not len(lengths):
        return
    result.empty = int((lengths == 0).sum())
    result.shortest, result.longest = int(lengths.min()), int(lengths.max())
    result.median = float(np.median(lengths))
    classes = np.where(lengths > 0, np.frexp(lengths.astype(np.float64))[1], 0)
    counts = np.bincount(classes)
    first = int(np.flatnonzero(counts)[0])
    result.histogram = [(0 if bits == 0 else 1 << (bits - 1), int(counts[bits])) for bits in range(first, len(counts))]


def _tokens(dataset: IndexedDataset, result: Examination) -> None:
    """Counts ids out of range and duplicate documents in one pass over the tokens."""
    hashes = array("Q")
    for number in range(result.documents):
        digest = hashlib.blake2b(digest_size=_HASH_BYTES)
        for sequence in range(int(dataset.documents[number]), int(dataset.documents[number + 1])):
            length = int(dataset.lengths[sequence])
            for start in range(0, length, _CHUNK_TOKENS):
                ids = dataset.get(sequence, start, min(_CHUNK_TOKENS, length - start))
                digest.update(ids.view(np.uint8).data)
                if result.vocab_size is not None:
                    _check_range(ids, sequence, start, result)
        hashes.append(int.from_bytes(digest.digest(), "little"))
    _duplicates(np.frombuffer(hashes, np.uint64) if hashes else np.empty(0, np.uint64), result)


def _check_range(ids: np.ndarray, sequence: int, start: int, result: Examination) -> None:
    vocab_size = result.vocab_size or 0
    if int(ids.max()) < vocab_size and int(ids.min()) >= 0:
        return
    wrong = np.flatnonzero((ids < 0) | (ids >= vocab_size))
    if not result.out_of_range:
        result.first_out_of_range = f"sequence {sequence}, token {start + int(wrong[0])}: id {int(ids[wrong[0]])}"
    result.out_of_range += len(wrong)


def _duplicates(hashes: np.ndarray, result: Examination) -> None:
    """Counts documents with the hash of an earlier one, except empty ones."""
    nothing = int.from_bytes(hashlib.blake2b(digest_size=_HASH_BYTES).digest(), "little")
    order = np.argsort(hashes, kind="stable")
    ordered = hashes[order]
    again = np.flatnonzero((ordered[1:] == ordered[:-1]) & (ordered[1:] != nothing)) + 1
    result.duplicates = len(again)
    shown = sorted((int(order[index]), int(order[index - 1])) for index in again[:_SHOWN])
    result.shown_duplicates = [(earlier, later) for later, earlier in shown]
