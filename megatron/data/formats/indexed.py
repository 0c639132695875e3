"""Reader for Megatron's token files: a `.bin` of contiguous token ids and an `.idx` with the offset of each sequence.

Every table entry is checked against the sizes of both files on opening, so that a damaged pair is rejected at the start
and not when its bad sequence is drawn. See `index_layout.py` for the two layouts of an `.idx`.
"""

from __future__ import annotations

import hashlib
import mmap
import operator
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import overload

import numpy as np

from megatron.data.formats.index_layout import (
    CACHED_HEADER,
    CACHED_MAGIC,
    DTYPE_OF_CODE,
    FORMAT_VERSION,
    LONGEST_MAGIC_BYTES,
    LONGEST_SEQUENCE_TOKENS,
    MMAP_HEADER,
    MMAP_MAGIC,
    IndexTables,
)
from megatron.errors import DataError, StorageError
from megatron.files.exact import read_exactly
from megatron.files.failures import read_error
from megatron.files.plain import open_plain

_PROBES = 64
_PROBE_BYTES = 4096
_AMBIGUOUS_FLOAT_CODE = 7
_CHUNK_ENTRIES = 1 << 20
_HASHED_BYTES = 1 << 24
_MAPPED_ABOVE_BYTES = 1 << 20


class IndexedDataset:
    """Random access to the sequences of one `.bin/.idx` pair, checked on opening.

    The tables are mapped; token ids are read with positioned reads of exact length, so that a file truncated while in
    use raises an error, not SIGBUS. Safe to use from several threads.

    Shapes:
        lengths: int32 [N]; pointers: int64 [N] in bytes; documents: int64 [D].

    Args:
        prefix: path of the pair without `.bin` and `.idx`.

    Raises:
        DataError: a file is missing or damaged, or the two do not match.
    """

    def __init__(self, prefix: str | Path) -> None:
        self.prefix = str(prefix)
        self.bin_path = Path(self.prefix + ".bin")
        self.idx_path = Path(self.prefix + ".idx")
        for path in (self.idx_path, self.bin_path):
            if not path.exists():
                raise DataError(_missing_file_text(self.prefix, path))
        try:
            self._bin = open_plain(self.bin_path, buffering=0)
            self._index = read_token_index(self.idx_path, self.bin_path, os.fstat(self._bin.fileno()).st_size)
        except OSError as failure:
            raise read_error(failure, self.idx_path) from failure
        self.dtype = self._index.dtype
        self.lengths = self._index.lengths
        self.pointers = self._index.pointers
        self.documents = self._index.documents
        self.modes = self._index.modes
        self.is_cached = self._index.is_cached
        self.tokens = self._index.tokens

    @property
    def layout(self) -> str:
        """The layout of the index in terms of `--data-impl`: "mmap" or "cached" (shared with lazy)."""
        return "cached" if self.is_cached else "mmap"

    @property
    def counts(self) -> tuple[int, int, int]:
        return len(self), len(self.documents) - 1, self.tokens

    def __len__(self) -> int:
        return len(self.lengths)

    def __repr__(self) -> str:
        return f"IndexedDataset({self.prefix!r}, sequences={len(self)}, tokens={self.tokens}, dtype={self.dtype.name})"

    def __reduce__(self) -> tuple[type[IndexedDataset], tuple[str]]:
        return IndexedDataset, (self.prefix,)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over the header, the lengths, the document table and 64 chunks of the token ids.

        Files with different lengths always differ; files with different tokens differ unless all chunks agree.
        """
        digest = hashlib.sha256(self._index.fingerprint().encode())
        size = self.tokens * self.dtype.itemsize
        last = max(0, size - _PROBE_BYTES)
        for start in sorted({last * probe // (_PROBES - 1) for probe in range(_PROBES)}):
            digest.update(self._read(start, min(_PROBE_BYTES, size)))
        return digest.hexdigest()

    def get(self, sequence: int, offset: int = 0, length: int | None = None) -> np.ndarray:
        """Reads tokens [offset, offset + length) of a sequence; by default up to its end.

        Raises:
            IndexError: the sequence or the range is out of bounds.
            DataError: one of the two files was truncated since it was opened.
        """
        sequence, offset = operator.index(sequence), operator.index(offset)
        if not 0 <= sequence < len(self):
            raise IndexError(f"Sequence {sequence} is out of range: {self.prefix} has {len(self)} sequences.")
        self._index.check_uncut()
        available = int(self.lengths[sequence])
        length = available - offset if length is None else operator.index(length)
        if offset < 0 or length < 0 or offset + length > available:
            raise IndexError(
                f"{self.prefix}: sequence {sequence} has {available} tokens; tokens {offset} to {offset + length} do "
                "not exist."
            )
        start = int(self.pointers[sequence]) + offset * self.dtype.itemsize
        return np.frombuffer(self._read(start, length * self.dtype.itemsize), dtype=self.dtype)

    def tokens_at(self, pointer: int, count: int) -> np.ndarray:
        """Reads tokens from a byte offset of the `.bin` file, regardless of sequences.

        Raises:
            DataError: the `.bin` file ended early.
        """
        return np.frombuffer(self._read(pointer, count * self.dtype.itemsize), dtype=self.dtype)

    @overload
    def __getitem__(self, item: int | np.integer) -> np.ndarray: ...
    @overload
    def __getitem__(self, item: slice) -> list[np.ndarray]: ...
    def __getitem__(self, item: int | np.integer | slice) -> np.ndarray | list[np.ndarray]:
        """Returns one sequence, or a list of them for a slice without step.

        Raises:
            IndexError: the sequence is out of range.
            ValueError: the slice has a step.
        """
        if isinstance(item, slice):
            start, stop, step = item.indices(len(self))
            if step != 1:
                raise ValueError(f"Sequences are read in order: a slice with step {step} is not supported.")
            return [self.get(sequence) for sequence in range(start, stop)]
        sequence = operator.index(item)
        return self.get(sequence + len(self) if sequence < 0 else sequence)

    def _read(self, start: int, size: int) -> bytes:
        try:
            data = read_exactly(lambda count, done: os.pread(self._bin.fileno(), count, start + done), size)
        except OSError as failure:
            raise StorageError(
                f"{self.bin_path}: {size} bytes at byte offset {start} cannot be read: {failure.strerror}. Check the "
                "file system and start again."
            ) from failure
        if len(data) < size:
            raise DataError(
                f"{self.bin_path}: the file ended {size - len(data)} bytes short of byte offset {start + size}. "
                "It was truncated while in use: restore it and start again."
            )
        return data


def check_pair(prefix: str) -> None:
    """Checks that the two files of a pair exist and can be read, and that the index has a valid header.

    Raises:
        DataError: the check failed.
    """
    index, tokens = Path(prefix + ".idx"), Path(prefix + ".bin")
    for path in (index, tokens):
        if not path.exists():
            raise DataError(_missing_file_text(prefix, path))
    try:
        with open_plain(tokens), open_plain(index) as stream:
            check_magic(index, stream.read(LONGEST_MAGIC_BYTES), index.stat().st_size)
    except OSError as failure:
        raise read_error(failure, index) from failure


def _missing_file_text(prefix: str, path: Path) -> str:
    """Returns a message with the missing file and, if possible, the prefix that was probably meant."""
    for suffix in (".bin", ".idx"):
        if prefix.endswith(suffix):
            return (
                f"{path} does not exist. A data prefix is given without its suffix: use {prefix.removesuffix(suffix)}."
            )
    if Path(prefix).is_file():
        make = f"tools/preprocess_data.py --input {prefix} --output-prefix NAME"
        return f"{prefix} (a data path) is a file, not token files. Create them: {make}; or: train_on_text.py {prefix}"
    folder = Path(prefix).parent
    near = sorted(str(index.with_suffix("")) for index in folder.glob("*.idx")) if folder.is_dir() else []
    likely = [name for name in near if name.startswith(prefix)] or near
    absolute = os.path.abspath(folder)
    if likely:
        hint = f"The folder holds {', '.join(likely[:3])}."
    elif folder.is_dir():
        hint = f"{absolute} holds no .idx file. Give another prefix, or create one with tools/preprocess_data.py."
    else:
        hint = f"The folder {absolute} does not exist either. Give another prefix."
    return f"{path} does not exist (data prefix {prefix}). {hint}"


@dataclass(frozen=True)
class TokenIndex:
    """The checked tables of one `.idx` file (views of the mapped file where the layout allows it).

    Shapes:
        lengths: int32 [N], tokens of each sequence.
        pointers: int64 [N], byte offset of each sequence in the `.bin` file.
        documents: int64 [D], 0, then the number of sequences up to the end of each document.
        modes: int8 [N] or None, NVIDIA's multimodal addition (0 text, 1 image).

    Args:
        is_cached: the file has the older layout.
    """

    path: Path
    dtype: np.dtype
    lengths: np.ndarray
    pointers: np.ndarray
    documents: np.ndarray
    modes: np.ndarray | None
    tokens: int
    raw: memoryview
    hashed_ranges: tuple[tuple[int, int], ...]
    is_cached: bool

    def check_uncut(self) -> None:
        """Checks that the file still has its length: reading a map beyond its end would kill the process.

        Raises:
            DataError: the file was truncated.
        """
        mapped = self.raw.obj
        if isinstance(mapped, mmap.mmap) and mapped.size() < len(self.raw):
            raise DataError(
                f"{self.path}: the file has {mapped.size()} bytes and had {len(self.raw)} when it was opened. It was "
                "truncated while in use: restore it and start again."
            )

    def fingerprint(self) -> str:
        """Returns the SHA-256 over the header, the lengths and the document table, which imply the pointers."""
        self.check_uncut()
        digest = hashlib.sha256()
        for start, stop in self.hashed_ranges:
            for offset in range(start, stop, _HASHED_BYTES):
                digest.update(self.raw[offset : min(offset + _HASHED_BYTES, stop)])
        return digest.hexdigest()


def read_token_index(path: Path, bin_path: Path, bin_bytes: int) -> TokenIndex:
    """Opens and checks an `.idx` file of either layout.

    Args:
        path: the `.idx` file.
        bin_path: its `.bin` file, named in messages.
        bin_bytes: size of the `.bin` file.

    Raises:
        DataError: the file is damaged or does not match its `.bin`; the message has the entry and its byte offset.
    """
    with open_plain(path) as stream:
        size = stream.seek(0, 2)
        if size > _MAPPED_ABOVE_BYTES:
            raw = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        else:  # a map would keep the file open, and hundreds of small sources add up
            stream.seek(0)
            raw = memoryview(stream.read())
    beginning = bytes(raw[:LONGEST_MAGIC_BYTES])
    check_magic(path, beginning, size)
    is_cached = beginning != MMAP_MAGIC
    header = CACHED_HEADER if is_cached else MMAP_HEADER
    if size < header.size:
        raise DataError(
            f"{path}: the file has {size} bytes, less than the header's {header.size}. It was truncated: copy it again."
        )
    magic, version, code, *numbers = header.unpack_from(raw)
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: layout version {version} (byte offset {len(magic)}) is unknown; expected {FORMAT_VERSION}."
        )
    if is_cached:
        return _read_cached_layout(path, raw, code, numbers, bin_path, bin_bytes)
    return _read_mmap_layout(path, raw, code, numbers, bin_path, bin_bytes)


def check_magic(path: Path, beginning: bytes, size: int) -> None:
    """Checks the magic bytes of an index of either layout.

    Raises:
        DataError: the file is not an index.
    """
    if not beginning.startswith((MMAP_MAGIC, CACHED_MAGIC)):
        raise DataError(
            f"{path}: the file ({size} bytes) begins with {beginning!r}; a token index begins with {MMAP_MAGIC!r} or "
            f"{CACHED_MAGIC!r}. It is not an index, or its beginning is damaged: preprocess the corpus again."
        )


def _read_mmap_layout(
    path: Path, raw: memoryview, code: int, numbers: Sequence[int], bin_path: Path, bin_bytes: int
) -> TokenIndex:
    """Reads `MMIDIDX`: int32 lengths, int64 pointers, int64 documents, and maybe int8 modes; nothing is aligned."""
    sequences, entries = numbers
    tables = IndexTables(False, sequences, entries - 1)
    end = tables.at_modes
    if len(raw) not in (end, end + sequences):
        raise DataError(
            f"{path}: the header (byte offset 18) announces {sequences} sequences and {entries} document entries, "
            f"which take {end} bytes; the file has {len(raw)}. It was truncated or overwritten: copy or preprocess it "
            "again."
        )
    lengths = _table(raw, "<i4", tables.at_lengths, sequences)
    _check_lengths(path, lengths, tables.at_lengths, 4)
    tokens = int(lengths.sum(dtype=np.int64))
    dtype = _dtype_of(path, code, 17, tokens, bin_bytes)
    pointers = _table(raw, "<i8", tables.at_starts, sequences)
    _check_offsets(path, pointers, lengths, dtype.itemsize, tables.at_starts, "pointer", bin_path, bin_bytes)
    documents = _documents(path, raw, tables)
    modes = _table(raw, "i1", end, sequences) if sequences and len(raw) == end + sequences else None
    hashed = ((0, tables.at_starts), (tables.at_documents, len(raw)))
    return TokenIndex(path, dtype, lengths, pointers, documents, modes, tokens, raw, hashed, False)


def _read_cached_layout(
    path: Path, raw: memoryview, code: int, numbers: Sequence[int], bin_path: Path, bin_bytes: int
) -> TokenIndex:
    """Reads `TNTIDX`: int64 dimension offsets and data offsets (N + 1 each), int64 sizes, int64 documents."""
    element_bytes, sequences, sizes_count, entries = numbers
    tables = IndexTables(True, sequences, entries - 1)
    end = tables.at_modes + 8 * (sizes_count - sequences)
    if len(raw) != end:
        raise DataError(
            f"{path}: the header (byte offset 32) announces {sequences} sequences, {sizes_count} sizes and {entries} "
            f"document entries, which take {end} bytes; the file has {len(raw)}. It was truncated or overwritten: copy "
            "or preprocess it again."
        )
    if sizes_count != sequences:
        raise DataError(
            f"{path}: {sizes_count} sizes for {sequences} sequences (byte offset 40); "
            "a token file has exactly one size per sequence."
        )
    at_dimensions = CACHED_HEADER.size
    dimensions = _table(raw, "<i8", at_dimensions, sequences + 1)
    wrong = np.flatnonzero(dimensions != np.arange(sequences + 1))
    if wrong.size:
        rule = f"must be {wrong[0]}"
        raise _entry_error(path, "dimension offset", int(wrong[0]), at_dimensions, 8, dimensions, rule)
    sizes = _table(raw, "<i8", tables.at_lengths, sequences)
    _check_lengths(path, sizes, tables.at_lengths, 8)
    lengths = sizes.astype(np.int32)
    tokens = int(sizes.sum())
    dtype = _dtype_of(path, code, 16, tokens, bin_bytes)
    if element_bytes != dtype.itemsize:
        raise DataError(
            f"{path}: {element_bytes} bytes per element (byte offset 24), but dtype code {code} has {dtype.itemsize}."
        )
    offsets, width = _table(raw, "<i8", tables.at_starts, sequences + 1), dtype.itemsize
    _check_offsets(path, offsets[:-1], lengths, 1, tables.at_starts, "data offset", bin_path, bin_bytes // width)
    if int(offsets[-1]) != tokens or bin_bytes != tokens * width:
        raise DataError(
            f"{path}: the last data offset (byte offset {tables.at_lengths - 8}) is {int(offsets[-1])}; the sizes sum "
            f"to {tokens} elements of {width} bytes and {bin_path} has {bin_bytes} bytes. The three must agree."
        )
    documents, hashed = _documents(path, raw, tables), ((0, len(raw)),)
    return TokenIndex(path, dtype, lengths, offsets[:-1] * width, documents, None, tokens, raw, hashed, True)


def _table(raw: memoryview, dtype: str, offset: int, count: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype)
    return np.frombuffer(raw, dtype=dtype, count=count, offset=offset)


def _dtype_of(path: Path, code: int, offset: int, tokens: int, bin_bytes: int) -> np.dtype:
    """Returns the dtype for a code; the width of the ambiguous code 7 follows from the size of the `.bin` file."""
    if code == _AMBIGUOUS_FLOAT_CODE:
        return np.dtype("<f8") if bin_bytes == 8 * tokens else np.dtype("<f4")
    if code not in DTYPE_OF_CODE:
        raise DataError(f"{path}: dtype code {code} (byte offset {offset}) is unknown; codes 1 to 8 exist.")
    return DTYPE_OF_CODE[code]


def _check_lengths(path: Path, lengths: np.ndarray, table_offset: int, entry_bytes: int) -> None:
    for start in range(0, len(lengths), _CHUNK_ENTRIES):
        chunk = lengths[start : start + _CHUNK_ENTRIES]
        wrong = np.flatnonzero((chunk < 0) | (chunk > LONGEST_SEQUENCE_TOKENS))
        if wrong.size:
            entry = start + int(wrong[0])
            rule = f"must be from 0 to {LONGEST_SEQUENCE_TOKENS}"
            raise _entry_error(path, "length", entry, table_offset, entry_bytes, lengths, rule)


def _check_offsets(
    path: Path,
    offsets: np.ndarray,
    lengths: np.ndarray,
    unit: int,
    table_offset: int,
    what: str,
    bin_path: Path,
    bin_units: int,
) -> None:
    """Checks that offsets are the exclusive running sum of the lengths (times `unit`) up to the end of the `.bin`."""
    total = 0
    for start in range(0, len(offsets), _CHUNK_ENTRIES):
        ends = np.cumsum(lengths[start : start + _CHUNK_ENTRIES], dtype=np.int64) * unit + total
        chunk = offsets[start : start + _CHUNK_ENTRIES]
        expected = np.empty_like(ends)
        expected[0] = total
        expected[1:] = ends[:-1]
        beyond = np.flatnonzero(ends > bin_units)
        wrong = np.flatnonzero(chunk != expected)
        if wrong.size and not (beyond.size and beyond[0] < wrong[0]):
            entry = start + int(wrong[0])
            rule = f"must be {int(expected[wrong[0]])}, the end of the previous sequence"
            raise _entry_error(path, what, entry, table_offset, 8, offsets, rule)
        if beyond.size:
            entry = start + int(beyond[0])
            raise DataError(
                f"{path}: sequence {entry} ({what} at byte offset {table_offset + 8 * entry}) ends at "
                f"{int(ends[beyond[0]])}, but {bin_path} ends at {bin_units}. One of the two files was truncated or is "
                f"from another run: copy both again."
            )
        total = int(ends[-1])
    if total != bin_units:
        raise DataError(
            f"{bin_path}: the file has {bin_units - total} bytes after byte offset {total}, the end of the last "
            f"sequence of {path}. The two files do not match: copy both again."
        )


def _documents(path: Path, raw: memoryview, tables: IndexTables) -> np.ndarray:
    """Returns the document table, checked to run from 0 to the number of sequences without decreasing."""
    offset, sequences = tables.at_documents, tables.sequences
    documents = _table(raw, "<i8", offset, tables.documents + 1)
    if len(documents) == 0:
        raise DataError(f"{path}: the document table (byte offset {offset}) is empty; it must begin with 0.")
    if documents[0] != 0:
        raise _entry_error(path, "document", 0, offset, 8, documents, "must be 0")
    for start in range(0, len(documents) - 1, _CHUNK_ENTRIES):
        chunk = documents[start : start + _CHUNK_ENTRIES + 1]
        wrong = np.flatnonzero((chunk[1:] < chunk[:-1]) | (chunk[1:] > sequences))
        if wrong.size:
            entry = start + int(wrong[0]) + 1
            before = int(documents[entry - 1])
            rule = f"must be between the previous entry ({before}) and the number of sequences ({sequences})"
            raise _entry_error(path, "document", entry, offset, 8, documents, rule)
    if documents[-1] != sequences:
        rule = f"must be the number of sequences ({sequences}); an old merge tool may have lost the table"
        raise _entry_error(path, "document", len(documents) - 1, offset, 8, documents, rule)
    return documents


def _entry_error(
    path: Path, what: str, entry: int, table_offset: int, entry_bytes: int, table: np.ndarray, rule: str
) -> DataError:
    offset = table_offset + entry_bytes * entry
    return DataError(
        f"{path}: {what} {entry} (byte offset {offset}) is {int(table[entry])}; it {rule}. The file is damaged."
    )
