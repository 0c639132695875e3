"""Writer for Megatron's token files: both files of a pair appear, complete, when the writer is closed."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import IO, BinaryIO

import numpy as np
from numpy.typing import ArrayLike, DTypeLike

from megatron import log
from megatron.data.formats.index_layout import CODE_OF_DTYPE, LONGEST_SEQUENCE_TOKENS, IndexLayout
from megatron.data.formats.sidecar import Sidecar, SourceRecord, is_sidecar, sidecar_path, write_temporary_sidecar
from megatron.errors import DataError, StorageError
from megatron.files.failures import storage_error
from megatron.files.replacing import (
    discard,
    publish_together,
    remove_leftovers,
    start_write_back,
    sync_file,
    temporary_name,
    write_temporary,
)
from megatron.tokenizers.record import TokenizerRecord

_NARROW_VOCABULARY_LIMIT = 65500
_COPY_ENTRIES = 1 << 20
_WRITE_BACK_BYTES = 1 << 20


def width_for(vocab_size: int | None, *, is_cached: bool = False) -> np.dtype:
    """Returns the dtype for the ids of a vocabulary, as in upstream: uint16 below 65500 entries, else int32.

    The cached layout and an unknown vocabulary always use int32.
    """
    narrow = vocab_size is not None and vocab_size < _NARROW_VOCABULARY_LIMIT and not is_cached
    return np.dtype(np.uint16 if narrow else np.int32)


def clear_leftovers(prefix: str | Path) -> None:
    """Removes and logs temporary files of a pair and its sidecar left behind by killed runs on this machine."""
    for path in (Path(f"{prefix}.bin"), Path(f"{prefix}.idx"), sidecar_path(prefix)):
        for leftover in remove_leftovers(path):
            log.info(f"Removed {leftover}, left behind by a killed run.")


class IndexedWriter:
    """Writes one `.bin/.idx` pair; the files get their names, `.idx` last, only once everything is on disk.

    Use as a context manager; an exception leaves no files behind. Memory does not grow with the data: lengths and
    document ends go to unnamed temporary files in the same folder.

    Args:
        prefix: path of the pair without suffix; its folder is created if necessary.
        dtype: element type of the `.bin` file, see `width_for`.
        is_cached: write the `.idx` file in upstream's older layout ("cached" and "lazy"); its own tools expect int32.

    Raises:
        DataError: ids do not fit the element type, or lengths and tokens disagree.
        StorageError: a write failed.
    """

    def __init__(self, prefix: str | Path, dtype: DTypeLike, *, is_cached: bool = False) -> None:
        self.bin_path = Path(str(prefix) + ".bin")
        self.idx_path = Path(str(prefix) + ".idx")
        self.dtype = np.dtype(dtype).newbyteorder("<")
        if self.dtype not in CODE_OF_DTYPE or self.dtype.kind not in "iu":
            raise DataError(f"Token ids cannot be written as {self.dtype.name}; use uint16 or int32 (see width_for).")
        self._is_cached = is_cached
        self.sequences = 0
        self.tokens = 0
        self.document_count = 0
        self._prefix = prefix
        self._sidecar: Sidecar | None = None
        self._ready: list[tuple[Path, Path]] = []
        self._is_published = False
        self._streams: list[IO[bytes]] = []
        clear_leftovers(prefix)
        self._temporary_bin = temporary_name(self.bin_path)
        try:
            self.bin_path.parent.mkdir(parents=True, exist_ok=True)
            self._streams.append(self._temporary_bin.open("xb", buffering=1 << 20))
            for _ in range(2):
                self._streams.append(tempfile.TemporaryFile(dir=self.bin_path.parent, buffering=1 << 18))
        except OSError as failure:
            self._abandon()
            raise storage_error(self.bin_path, failure) from failure
        self._bin, self._lengths, self._documents = self._streams

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None and not self._is_published:
                publish_pairs([self])
        finally:
            self._abandon()

    def describe(
        self,
        tokenizer: TokenizerRecord,
        versions: Mapping[str, str],
        sources: tuple[SourceRecord, ...],
        *,
        append_eod: bool,
        empty: int,
        skipped: int = 0,
    ) -> None:
        """Adds a `Sidecar` to the complete pair; without it, publishing removes an older sidecar."""
        counts = (self.document_count, empty, skipped, self.sequences, self.tokens)
        self._sidecar = Sidecar(*counts, append_eod, tokenizer, versions, sources)

    def add_document(self, sequences: Iterable[ArrayLike]) -> None:
        """Appends a document that consists of sequences of token ids; no sequences make an empty document."""
        arrays = [np.asarray(sequence) for sequence in sequences]
        lengths = [array.size for array in arrays]
        tokens = np.concatenate(arrays) if arrays else np.empty(0, self.dtype)
        self.add_batch(tokens, lengths, [len(lengths)])

    def add_batch(
        self, tokens: ArrayLike, lengths: Sequence[int] | np.ndarray, sequences_per_document: ArrayLike | None = None
    ) -> None:
        """Appends many sequences at once.

        Shapes:
            tokens: [sum of lengths]; lengths: [n]; sequences_per_document: [documents], summing to n.

        Args:
            sequences_per_document: number of sequences in each document; 1 by default.
        """
        ids = self._checked_tokens(np.asarray(tokens))
        counts, ends = self._checked_tables(lengths, sequences_per_document)
        if int(counts.sum()) != ids.size:
            raise DataError(f"{self.bin_path}: got {ids.size} tokens, but the lengths sum to {int(counts.sum())}.")
        start = self.tokens * self.dtype.itemsize
        self._append(ids.view(np.uint8).data, counts, ends)
        if ids.nbytes >= _WRITE_BACK_BYTES:
            start_write_back(self._bin.fileno(), start, ids.nbytes)

    def reserve(
        self, lengths: Sequence[int] | np.ndarray, sequences_per_document: ArrayLike | None = None
    ) -> tuple[str, int]:
        """Appends sequences whose tokens another process writes, as `dtype`, before this writer is closed.

        Shapes:
            as in `add_batch`.

        Returns:
            path of the unfinished `.bin` file, and the byte offset for the tokens.
        """
        counts, ends = self._checked_tables(lengths, sequences_per_document)
        start = self.tokens * self.dtype.itemsize
        self._append(b"", counts, ends)
        try:
            self._bin.seek(self.tokens * self.dtype.itemsize)
        except OSError as failure:
            raise self._refused(failure) from failure
        return str(self._temporary_bin), start

    def _checked_tables(
        self, lengths: Sequence[int] | np.ndarray, sequences_per_document: ArrayLike | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns lengths of sequences, and the number of sequences in the file up to the end of each document."""
        counts = np.asarray(lengths, dtype=np.int64)
        per_document = (
            np.ones(len(counts), np.int64) if sequences_per_document is None else np.asarray(sequences_per_document)
        )
        if counts.size and (counts.min() < 0 or counts.max() > LONGEST_SEQUENCE_TOKENS):
            worst = int(counts.min() if counts.min() < 0 else counts.max())
            raise DataError(
                f"{self.bin_path}: invalid length of a sequence: {worst} tokens; 0 to {LONGEST_SEQUENCE_TOKENS} fit."
            )
        if int(per_document.sum()) != len(counts) or (per_document.size and per_document.min() < 0):
            raise DataError(
                f"{self.bin_path}: got {len(counts)} sequences, but the documents hold {int(per_document.sum())}."
            )
        return counts, self.sequences + np.cumsum(per_document, dtype=np.int64)

    def _checked_tokens(self, tokens: np.ndarray) -> np.ndarray:
        if tokens.size == 0:
            return np.empty(0, self.dtype)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise DataError(
                f"{self.bin_path}: token ids must be 1-D integers, not {tokens.ndim}-D {tokens.dtype.name}."
            )
        if tokens.dtype != self.dtype:
            limits = np.iinfo(self.dtype)
            low, high = int(tokens.min()), int(tokens.max())
            if low < limits.min or high > limits.max:
                wrong = low if low < limits.min else high
                raise DataError(
                    f"{self.bin_path}: token id {wrong} does not fit {self.dtype.name} ({limits.min} to {limits.max}). "
                    "Open the writer with width_for(vocabulary size)."
                )
            tokens = tokens.astype(self.dtype)
        return np.ascontiguousarray(tokens)

    def _append(self, data: bytes | memoryview, lengths: np.ndarray, document_ends: np.ndarray) -> None:
        try:
            self._bin.write(data)
            self._lengths.write(lengths.astype("<i4").tobytes())
            self._documents.write(document_ends.astype("<i8").tobytes())
        except OSError as failure:
            raise self._refused(failure) from failure
        self.sequences += len(lengths)
        self.tokens += int(lengths.sum())
        self.document_count += len(document_ends)

    def _complete(self) -> None:
        """Writes everything to disk under temporary names."""
        try:
            self._bin.flush()
            written = os.fstat(self._bin.fileno()).st_size
            if written != self.tokens * self.dtype.itemsize:
                raise DataError(
                    f"{self.bin_path}: {written} bytes were written, but {self.tokens} tokens take "
                    f"{self.tokens * self.dtype.itemsize}; nothing was published. Run the same command again."
                )
            sync_file(self._bin.fileno())
        except OSError as failure:
            raise self._refused(failure) from failure
        if self._sidecar is not None:
            temporary = write_temporary_sidecar(self._prefix, self._sidecar)
            self._ready.append((temporary, sidecar_path(self._prefix)))
        layout = IndexLayout(self._is_cached, self.sequences, self.document_count, self.dtype, self.tokens)
        temporary = write_temporary(self.idx_path, partial(self._write_index, layout), layout.size_bytes)
        self._ready = [(self._temporary_bin, self.bin_path), *self._ready, (temporary, self.idx_path)]

    def _refused(self, failure: OSError) -> StorageError:
        return storage_error(self.bin_path, failure, self.tokens * self.dtype.itemsize)

    def _write_index(self, layout: IndexLayout, stream: BinaryIO) -> None:
        for spilled in (self._lengths, self._documents):
            spilled.flush()
        for offset, data in self._entries(layout):
            stream.seek(offset)
            stream.write(data)

    def _entries(self, layout: IndexLayout) -> Iterator[tuple[int, bytes]]:
        yield from layout.frame()
        first = tokens = 0
        for chunk in _chunks(self._lengths, 4):
            lengths = np.frombuffer(chunk, "<i4")
            yield from layout.of_sequences(first, lengths, tokens)
            first += len(lengths)
            tokens += int(lengths.sum(dtype=np.int64))
        first = 0
        for chunk in _chunks(self._documents, 8):
            ends = np.frombuffer(chunk, "<i8")
            yield layout.of_documents(first, ends)
            first += len(ends)

    def _abandon(self) -> None:
        for stream in self._streams:
            with contextlib.suppress(OSError):
                stream.close()
        for temporary, _ in (*self._ready, (self._temporary_bin, self.bin_path)):
            discard(temporary)


def publish_pairs(writers: Sequence[IndexedWriter]) -> None:
    """Completes writers of one folder and publishes all their files, or none if the disk fails.

    The `.idx` of each pair comes last, so that a crash leaves no mismatched pair.

    Raises:
        DataError: fewer tokens were written than reserved.
        StorageError: the file system failed; older files of these names are unchanged.
    """
    for writer in writers:
        writer._complete()
    described = [sidecar_path(writer._prefix) for writer in writers if writer._sidecar is None]
    publish_together(
        [pair for writer in writers for pair in writer._ready], [path for path in described if is_sidecar(path)]
    )
    for writer in writers:
        writer._is_published = True


def _chunks(stream: IO[bytes], entry_bytes: int) -> Iterable[bytes]:
    stream.seek(0)
    while chunk := stream.read(_COPY_ENTRIES * entry_bytes):
        yield chunk
