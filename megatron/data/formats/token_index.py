"""The tables of an `.idx` file: where each sequence of token ids lies in its `.bin` file.

Two layouts exist in the Megatron family: `MMIDIDX` (written by every current preprocessing tool) and the older `TNTIDX`
("cached" and "lazy"); `index_layout.py` writes both. Every entry of every table is checked against the sizes of both
files when an index is opened, so that a damaged pair is refused at the start and not when its bad sequence is drawn.

Source: bigscience Megatron-DeepSpeed `megatron/data/indexed_dataset.py`; NVIDIA Megatron-LM
`megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import hashlib
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from megatron.errors import DataError
from megatron.files.plain import open_plain

MMAP_MAGIC = b"MMIDIDX\x00\x00"
MMAP_HEADER = struct.Struct("<9sQBQQ")
CACHED_MAGIC = b"TNTIDX\x00\x00"
CACHED_HEADER = struct.Struct("<8sQQQQQQ")
LONGEST_MAGIC_BYTES = len(MMAP_MAGIC)
FORMAT_VERSION = 1
LONGEST_SEQUENCE_TOKENS = 2**31 - 1

DTYPE_OF_CODE: dict[int, np.dtype] = {
    1: np.dtype("<u1"),
    2: np.dtype("<i1"),
    3: np.dtype("<i2"),
    4: np.dtype("<i4"),
    5: np.dtype("<i8"),
    6: np.dtype("<f8"),
    8: np.dtype("<u2"),
}
"""What each dtype code means. Code 7 is float64 to bigscience and float32 to NVIDIA; the size of the `.bin` file
decides.
"""

CODE_OF_DTYPE = {dtype: code for code, dtype in DTYPE_OF_CODE.items()}

_AMBIGUOUS_FLOAT_CODE = 7
_CHUNK_ENTRIES = 1 << 20
_MAPPED_ABOVE_BYTES = 1 << 20


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

    @property
    def layout(self) -> str:
        """The layout's name: "mmap" (`MMIDIDX`) or "cached" (`TNTIDX`)."""
        return "mmap" if self.raw[: len(MMAP_MAGIC)] == MMAP_MAGIC else "cached"

    def check_uncut(self) -> None:
        """Checks that the file still is as long as it was: reading a map beyond its end would kill the process.

        Raises:
            DataError: it was truncated.
        """
        mapped = self.raw.obj
        if isinstance(mapped, mmap.mmap) and mapped.size() < len(self.raw):
            raise DataError(
                f"{self.path}: the file has {mapped.size()} bytes and had {len(self.raw)} when it was opened (byte "
                f"offset {mapped.size()} is its end now). It was truncated while in use: restore it and start again."
            )

    def fingerprint(self) -> str:
        """SHA-256 (hexadecimal) over the header, the lengths and the document table; the pointers follow from these."""
        self.check_uncut()
        digest = hashlib.sha256()
        for start, stop in self.hashed_ranges:
            for at in range(start, stop, 1 << 24):
                digest.update(self.raw[at : min(at + (1 << 24), stop)])
        return digest.hexdigest()


def read_token_index(path: Path, bin_path: Path, bin_bytes: int) -> TokenIndex:
    """Opens and checks an `.idx` file of either layout.

    Args:
        path: the `.idx` file.
        bin_path: its `.bin` file, named in messages.
        bin_bytes: size of the `.bin` file.

    Raises:
        DataError: the file is damaged or does not belong to its `.bin`; the text names the entry and its byte offset.
    """
    with open_plain(path) as stream:
        size = stream.seek(0, 2)
        if size > _MAPPED_ABOVE_BYTES:
            raw = memoryview(mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ))
        else:  # a map would hold the file open, and a blend of hundreds of small sources has many
            stream.seek(0)
            raw = memoryview(stream.read())
    beginning = bytes(raw[:LONGEST_MAGIC_BYTES])
    check_magic(path, beginning, size)
    if beginning == MMAP_MAGIC:
        return _read_mmap_layout(path, raw, bin_path, bin_bytes)
    return _read_cached_layout(path, raw, bin_path, bin_bytes)


def check_magic(path: Path, beginning: bytes, size: int) -> None:
    """Checks by its first bytes that a file is an index of either layout.

    Raises:
        DataError: it is not.
    """
    if not beginning.startswith((MMAP_MAGIC, CACHED_MAGIC)):
        raise DataError(
            f"{path}: the file ({size} bytes) begins with {beginning!r}; a token index begins with {MMAP_MAGIC!r} or "
            f"{CACHED_MAGIC!r}. It is not an index, or its beginning is damaged: preprocess the corpus again."
        )


def _read_mmap_layout(path: Path, raw: memoryview, bin_path: Path, bin_bytes: int) -> TokenIndex:
    """Reads `MMIDIDX`: header, int32 lengths, int64 pointers, int64 documents, and maybe int8 modes; nothing is
    aligned.
    """
    _check_header_fits(path, raw, MMAP_HEADER.size)
    _, version, code, sequences, entries = MMAP_HEADER.unpack_from(raw)
    _check_version(path, version, 9)
    at_pointers = MMAP_HEADER.size + 4 * sequences
    at_documents = at_pointers + 8 * sequences
    end = at_documents + 8 * entries
    if len(raw) not in (end, end + sequences):
        raise DataError(
            f"{path}: the header (byte offset 18) announces {sequences} sequences and {entries} document entries, "
            f"which take {end} bytes; the file has {len(raw)}. It was truncated or overwritten: copy or preprocess it "
            f"again."
        )
    lengths = _table(raw, "<i4", MMAP_HEADER.size, sequences)
    _check_lengths(path, lengths, MMAP_HEADER.size, 4)
    tokens = _token_count(lengths)
    dtype = _dtype_of(path, code, 17, tokens, bin_bytes)
    pointers = _table(raw, "<i8", at_pointers, sequences)
    _check_offsets(path, pointers, lengths, dtype.itemsize, at_pointers, "pointer", bin_path, bin_bytes)
    documents = _table(raw, "<i8", at_documents, entries)
    _check_documents(path, documents, sequences, at_documents)
    modes = _table(raw, "i1", end, sequences) if sequences and len(raw) == end + sequences else None
    hashed = ((0, at_pointers), (at_documents, len(raw)))
    return TokenIndex(path, dtype, lengths, pointers, documents, modes, tokens, raw, hashed, False)


def _read_cached_layout(path: Path, raw: memoryview, bin_path: Path, bin_bytes: int) -> TokenIndex:
    """Reads `TNTIDX`: header, int64 dimension offsets and data offsets (N + 1 each), int64 sizes, int64 documents."""
    _check_header_fits(path, raw, CACHED_HEADER.size)
    _, version, code, element_bytes, sequences, sizes_count, entries = CACHED_HEADER.unpack_from(raw)
    _check_version(path, version, 8)
    at_data = CACHED_HEADER.size + 8 * (sequences + 1)
    at_sizes = at_data + 8 * (sequences + 1)
    at_documents = at_sizes + 8 * sizes_count
    end = at_documents + 8 * entries
    if len(raw) != end:
        raise DataError(
            f"{path}: the header (byte offset 32) announces {sequences} sequences, {sizes_count} sizes and {entries} "
            f"document entries, which take {end} bytes; the file has {len(raw)}. It was truncated or overwritten: copy "
            f"or "
            "preprocess it again."
        )
    if sizes_count != sequences:
        raise DataError(
            f"{path}: {sizes_count} sizes for {sequences} sequences (byte offset 40); "
            "a token file has exactly one size per sequence."
        )
    dimensions = _table(raw, "<i8", CACHED_HEADER.size, sequences + 1)
    wrong = np.flatnonzero(dimensions != np.arange(sequences + 1))
    if wrong.size:
        raise _entry_error(
            path, "dimension offset", int(wrong[0]), CACHED_HEADER.size, 8, dimensions, f"must be {wrong[0]}"
        )
    sizes = _table(raw, "<i8", at_sizes, sequences)
    _check_lengths(path, sizes, at_sizes, 8)
    lengths = sizes.astype(np.int32)
    tokens = _token_count(lengths)
    dtype = _dtype_of(path, code, 16, tokens, bin_bytes)
    if element_bytes != dtype.itemsize:
        raise DataError(
            f"{path}: byte offset 24 says {element_bytes} bytes per element, but dtype code {code} has "
            f"{dtype.itemsize}."
        )
    offsets = _table(raw, "<i8", at_data, sequences + 1)
    _check_offsets(path, offsets[:-1], lengths, 1, at_data, "data offset", bin_path, bin_bytes // dtype.itemsize)
    if int(offsets[-1]) != tokens or bin_bytes != tokens * dtype.itemsize:
        raise DataError(
            f"{path}: the last data offset (byte offset {at_sizes - 8}) is {int(offsets[-1])}; the sizes sum to "
            f"{tokens} elements of {dtype.itemsize} bytes and {bin_path} has {bin_bytes} bytes. The three must agree."
        )
    documents = _table(raw, "<i8", at_documents, entries)
    _check_documents(path, documents, sequences, at_documents)
    pointers = offsets[:-1] * dtype.itemsize
    return TokenIndex(path, dtype, lengths, pointers, documents, None, tokens, raw, ((0, len(raw)),), True)


def _table(raw: memoryview, dtype: str, offset: int, count: int) -> np.ndarray:
    if count == 0:
        return np.empty(0, dtype)
    return np.frombuffer(raw, dtype=dtype, count=count, offset=offset)


def _token_count(lengths: np.ndarray) -> int:
    return int(lengths.sum(dtype=np.int64))


def _check_header_fits(path: Path, raw: memoryview, needed: int) -> None:
    if len(raw) < needed:
        raise DataError(
            f"{path}: the file has {len(raw)} bytes, its header alone takes {needed}. It was truncated: copy it again."
        )


def _check_version(path: Path, version: int, offset: int) -> None:
    if version != FORMAT_VERSION:
        raise DataError(
            f"{path}: layout version {version} (byte offset {offset}) is unknown; version {FORMAT_VERSION} is read."
        )


def _dtype_of(path: Path, code: int, offset: int, tokens: int, bin_bytes: int) -> np.dtype:
    """Maps a dtype code; the ambiguous code 7 takes the width with which the `.bin` file has its size."""
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
    """Checks that offsets are the exclusive running sum of the lengths (times `unit`) and end where the `.bin` file
    ends.
    """
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
            rule = f"must be {int(expected[wrong[0]])}, where the sequence before it ends"
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
            f"{bin_path}: the file has {bin_units - total} bytes after byte offset {total}, where the last sequence of "
            f"{path} ends. The two files do not belong together: copy both again."
        )


def _check_documents(path: Path, documents: np.ndarray, sequences: int, table_offset: int) -> None:
    if len(documents) == 0:
        raise DataError(f"{path}: the document table (byte offset {table_offset}) is empty; it must begin with 0.")
    if documents[0] != 0:
        raise _entry_error(path, "document", 0, table_offset, 8, documents, "must be 0")
    for start in range(0, len(documents) - 1, _CHUNK_ENTRIES):
        chunk = documents[start : start + _CHUNK_ENTRIES + 1]
        wrong = np.flatnonzero((chunk[1:] < chunk[:-1]) | (chunk[1:] > sequences))
        if wrong.size:
            entry = start + int(wrong[0]) + 1
            before = int(documents[entry - 1])
            rule = f"must lie between the entry before it ({before}) and the number of sequences ({sequences})"
            raise _entry_error(path, "document", entry, table_offset, 8, documents, rule)
    if documents[-1] != sequences:
        rule = f"must be the number of sequences ({sequences}); an old merge tool may have lost the table"
        raise _entry_error(path, "document", len(documents) - 1, table_offset, 8, documents, rule)


def _entry_error(
    path: Path, what: str, entry: int, table_offset: int, entry_bytes: int, table: np.ndarray, rule: str
) -> DataError:
    at = table_offset + entry_bytes * entry
    return DataError(
        f"{path}: {what} {entry} (byte offset {at}) is {int(table[entry])}; it {rule}. The file is damaged."
    )
