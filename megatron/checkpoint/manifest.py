"""The manifest: what a checkpoint folder holds, with a digest of every 16 MiB, of every file, and of itself.

`manifest.json` is JSON text whose last entry is the SHA-256 of all bytes before that entry, so no byte of it can change
unnoticed. A digest tells nothing about who wrote the text, so nothing in it is trusted before it was checked: what it
takes in memory is bounded, names are plain, numbers are in range, the pieces of a file are contiguous up to its end,
and pieces make up whole tensors.

Format version 1, entries in order:
    format, format_version, step, run: the program's name for the format, 1, the step, a random name of the save.
    record: the caller's JSON object.
    chunk_bytes: files are hashed in chunks of this many bytes, the last one shorter.
    files: rows of name, size in bytes, SHA-256, list of the chunks' SHA-256.
    tensors: rows of global name, global shape. kinds, types: the words that pieces refer to by number.
    pieces: rows of tensor, kind and element type (numbers in these tables), box start, box stop, flat range in the box
        (first, last), file (number in files), first byte in that file. Values are little-endian and row-major.
    digest: SHA-256 of everything before this entry.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from megatron.checkpoint.checks import LARGEST_BYTES, check_extent, parse_bounded
from megatron.checkpoint.layout import KINDS, StoredPiece, as_kind, check_complete, key_problem
from megatron.checkpoint.storage import DISK, Storage, opened, read_range, read_tail
from megatron.errors import CheckpointError, DamagedError, MegatronError, StorageError, printable
from megatron.parallel.pieces import PieceKey

FORMAT = "megatron-pieces"
FORMAT_VERSION = 1
MANIFEST_NAME = "manifest.json"
CHUNK_BYTES = 16 * 2**20
# safetensors name of an element type -> bytes per element (Source: safetensors README, "Format").
ITEM_BYTES: Mapping[str, int] = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
}

_LARGEST_NUMBER = 2**62
_LONGEST_NAME = 500
_LEAST_HEADER_BYTES = 10  # of a safetensors file: the length of its header, and {}
_LEAST_FILE_BYTES = 16  # of a checkpoint on the disk, for every byte of memory that its manifest takes beyond the bound
_SEAL = re.compile(rb'"digest": "([0-9a-f]{64})"\n}\n\Z')
_SEAL_BYTES = len(b'"digest": "') + 64 + len(b'"\n}\n')
_FILE_NAME = re.compile(r"pieces_[0-9]{5,7}\.safetensors\Z")
_FOLDER_NAME = re.compile(r"(?:iter_([0-9]{7,18})|\.old-iter_([0-9]{7,18})-[0-9a-f]+)\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")
# Errors of the operating system that concern this process, not the file: an older checkpoint would not help.
_NOT_THE_FILE = ("EACCES", "EPERM", "EMFILE", "ENFILE", "ENOMEM")


@dataclass(frozen=True)
class StoredFile:
    """One file of a checkpoint: its size and the SHA-256 of the whole and of each chunk."""

    name: str
    size_bytes: int
    sha256: str
    chunks: tuple[str, ...]


@dataclass(frozen=True)
class Manifest:
    """What a checkpoint folder holds."""

    step: int
    run: str
    record: dict[str, Any]
    chunk_bytes: int
    files: tuple[StoredFile, ...]
    pieces: tuple[StoredPiece, ...]
    digest: str


def manifest_bytes(
    step: int,
    run: str,
    record: Mapping[str, Any],
    chunk_bytes: int,
    files: Sequence[StoredFile],
    pieces: Sequence[StoredPiece],
) -> bytes:
    """The text of a manifest, digest included.

    Raises:
        CheckpointError: the record is not JSON.
    """
    tensors: dict[tuple[str, tuple[int, ...]], int] = {}
    rows: list[list[Any]] = []
    types = list(ITEM_BYTES)
    for piece in pieces:
        key = piece.key
        tensor = tensors.setdefault((key.name, key.shape), len(tensors))
        kind, dtype = KINDS.index(key.kind), types.index(piece.dtype)
        rows.append([tensor, kind, dtype, key.start, key.stop, key.first, key.last, piece.file, piece.begin_bytes])
    head = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step, "run": run}
    entries = {
        "chunk_bytes": chunk_bytes,
        "files": [[file.name, file.size_bytes, file.sha256, file.chunks] for file in files],
        "tensors": list(tensors),
        "kinds": KINDS,
        "types": types,
        "pieces": rows,
    }
    lines = [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in head.items()]
    lines.append(f'"record": {record_text(record)}')
    lines += [f"{json.dumps(name)}: {json.dumps(value, separators=(',', ':'))}" for name, value in entries.items()]
    body = ("{\n" + ",\n".join(lines) + ",\n").encode()
    return body + b'"digest": "' + hashlib.sha256(body).hexdigest().encode() + b'"\n}\n'


def record_text(record: Mapping[str, Any]) -> str:
    """The caller's record as JSON.

    Raises:
        CheckpointError: it holds something that JSON cannot hold (NaN and infinities included).
    """
    try:
        text = json.dumps(record, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as failure:
        raise CheckpointError(
            f"the record that goes with the checkpoint is not JSON: {failure}. It may hold numbers (finite), texts, "
            "true, false, null, lists and objects with text keys."
        ) from failure
    return text


def read_manifest(folder: Path, storage: Storage = DISK, known: Manifest | None = None) -> Manifest:
    """Reads and checks the manifest of one checkpoint folder; tensor files are not opened.

    Args:
        known: a manifest parsed before; returned instead of parsing the text again if it has the text's digest.

    Raises:
        DamagedError: it is missing, was changed, or contains impossible values.
        CheckpointError: it was written in another format version.
        StorageError: the system refused for a reason that has nothing to do with the file.
    """
    path = folder / MANIFEST_NAME
    if storage.exists(folder) and not storage.exists(path):
        raise DamagedError(
            f"{folder} has no {MANIFEST_NAME}: it is not complete, or another program wrote it (then convert it first)."
        )
    manifest = _read_or_refuse(path, storage, known)
    if not isinstance(manifest, Manifest):
        raise manifest
    number = folder_step(folder.name)
    if number is not None and number != manifest.step:
        raise DamagedError(
            f"{path} is of step {manifest.step}, not of its folder's step {number}. Use another checkpoint."
        )
    return manifest


def read_record(folder: Path) -> dict[str, Any]:
    """The record of one checkpoint folder.

    Raises:
        as `read_manifest`.
    """
    return read_manifest(folder).record


def _read_or_refuse(path: Path, storage: Storage, known: Manifest | None) -> Manifest | MegatronError:
    """The manifest, or why it is refused: as a value, since a traceback would keep the text of a huge one alive."""
    try:
        return _read(path, storage, known)
    except (CheckpointError, StorageError) as failure:
        return type(failure)(str(failure))


def _read(path: Path, storage: Storage, known: Manifest | None) -> Manifest:
    text = read_whole(storage, path)
    seal = _SEAL.search(text[-_SEAL_BYTES:])
    if seal is None:
        raise DamagedError(f"{path} is damaged: it does not end with its digest. Use another checkpoint.")
    digest = seal.group(1).decode()
    if hashlib.sha256(memoryview(text)[:-_SEAL_BYTES]).hexdigest() != digest:
        raise DamagedError(f"{path} is damaged: its content does not have the digest {digest}. Use another checkpoint.")
    return known if known is not None and known.digest == digest else _checked(path, text, digest, storage)


def stored_digest(folder: Path, storage: Storage) -> str | None:
    """The digest at the end of a manifest, by which one that was read before is recognized; its text is not compared.

    None without a manifest that ends so.
    """
    try:
        seal = _SEAL.search(read_tail(storage, folder / MANIFEST_NAME, _SEAL_BYTES))
    except OSError:
        return None
    return None if seal is None else seal.group(1).decode()


def folder_step(name: str) -> int | None:
    """The step in a checkpoint folder's name, or None when the name is not one."""
    match = _FOLDER_NAME.match(name)
    return int(match.group(1) or match.group(2)) if match else None


def folder_name(step: int) -> str:
    """The name of a checkpoint folder."""
    return f"iter_{step:07d}"


def file_name(rank: int) -> str:
    """The name of the file that a rank writes."""
    return f"pieces_{rank:05d}.safetensors"


def unreadable(path: Path, failure: OSError) -> CheckpointError | StorageError:
    """The error for a file that the system did not let us read: damage, or a problem of this process."""
    if failure.errno is not None and _errno_name(failure.errno) in _NOT_THE_FILE:
        return StorageError(
            f"cannot read {path}: {failure.strerror} ({_errno_name(failure.errno)}). "
            "The file may be good; give this user the right or the resource and start again."
        )
    return DamagedError(f"cannot read {path}: {failure.strerror or failure}. Use another checkpoint.")


def _errno_name(number: int) -> str:
    return errno.errorcode.get(number, str(number))


def read_whole(storage: Storage, path: Path) -> bytearray:
    """The bytes of a manifest, whose content is not checked yet.

    Raises:
        DamagedError: it is missing, or too large for the files next to it.
        StorageError: the system refused for a reason that has nothing to do with the file.
    """
    try:
        with opened(storage, path) as (handle, size_bytes):
            if 2 * size_bytes > LARGEST_BYTES:
                largest_bytes = (LARGEST_BYTES + _more_bytes(storage, path)) // 2
                if size_bytes > largest_bytes:
                    raise DamagedError(
                        f"{path} has {size_bytes} bytes; a manifest has at most {largest_bytes} for files of "
                        "these sizes. Use another checkpoint."
                    )
            content = bytearray(size_bytes)
            read_range(storage, handle, memoryview(content), 0)
            return content
    except OSError as failure:
        raise unreadable(path, failure) from failure


def _more_bytes(storage: Storage, path: Path) -> int:
    """The memory that a manifest may take beyond the usual: a checkpoint that fills a large disk has many pieces."""
    try:
        return storage.taken_bytes(path.parent) // _LEAST_FILE_BYTES
    except OSError as failure:
        raise unreadable(path, failure) from failure


def _checked(path: Path, text: bytes | bytearray, digest: str, storage: Storage) -> Manifest:
    """Parses a manifest whose digest is right.

    Raises:
        DamagedError, CheckpointError: as `read_manifest`.
    """
    try:
        values = parse_bounded(text, lambda: _more_bytes(storage, path))
        check_extent(values.get("record"))
    except ValueError as failure:
        raise DamagedError(f"{path} is not a manifest: {failure}. Use another checkpoint.") from failure
    if values.get("format") != FORMAT:
        shown = printable(values.get("format"))
        raise CheckpointError(f"{path} has format {shown}, not {FORMAT!r}: another program wrote it.")
    if type(values.get("format_version")) is not int or values["format_version"] != FORMAT_VERSION:
        raise CheckpointError(
            f"{path} has format_version {printable(values.get('format_version'))}; this program reads "
            f"{FORMAT_VERSION}. Read it with the program version that wrote it."
        )
    return _Parser(path, values).manifest(digest)


class _Parser:
    """Turns the parsed JSON into a `Manifest` and refuses what cannot be."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def manifest(self, digest: str) -> Manifest:
        chunk_bytes = self._number(self.values.get("chunk_bytes"), "chunk_bytes")
        if not 64 <= chunk_bytes <= 2**30:
            self._refuse(f"chunk_bytes is {chunk_bytes}")
        record = self.values.get("record")
        if not isinstance(record, dict):
            self._refuse("record is not an object")
        run = self.values.get("run")
        if not isinstance(run, str) or len(run) > _LONGEST_NAME:
            self._refuse(f"run is {printable(run)}, not a name")
        files = tuple(self._file(row, chunk_bytes) for row in self._rows("files", 4))
        if len({file.name for file in files}) != len(files):
            self._refuse("a file appears twice")
        tensors = [self._tensor(row) for row in self._rows("tensors", 2)]
        if len({name for name, _ in tensors}) != len(tensors):
            self._refuse("a tensor appears twice")
        pieces = self._pieces(files, tensors)
        step = self._number(self.values.get("step"), "step")
        self._check_files(files, pieces)
        self._check_tensors(tensors, pieces)
        return Manifest(step, run, record, chunk_bytes, files, pieces, digest)

    def _file(self, row: list[Any], chunk_bytes: int) -> StoredFile:
        name, size, digest, chunks = row
        if not isinstance(name, str) or not _FILE_NAME.match(name):
            self._refuse(f"file name {printable(name)} is not of the form pieces_00000.safetensors")
        size_bytes = self._number(size, f"size of {name}")
        if not isinstance(chunks, list) or len(chunks) != -(-size_bytes // chunk_bytes):
            self._refuse(f"{name} has {size_bytes} bytes, which does not fit its number of chunk digests")
        for text in [digest, *chunks]:
            if not isinstance(text, str) or not _DIGEST.match(text):
                self._refuse(f"{printable(text)} is not a SHA-256 digest of {name}")
        return StoredFile(name, size_bytes, digest, tuple(chunks))

    def _tensor(self, row: list[Any]) -> tuple[str, tuple[int, ...]]:
        name, shape = row
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            self._refuse(f"tensor name {printable(name)} is not a text of up to {_LONGEST_NAME} printable letters")
        return name, self._numbers(shape, f"shape of {name}")

    def _pieces(
        self, files: tuple[StoredFile, ...], tensors: list[tuple[str, tuple[int, ...]]]
    ) -> tuple[StoredPiece, ...]:
        """Reads the pieces; each row is given up as soon as it is read, so that not all are in memory twice."""
        kinds, types = self.values.get("kinds"), self.values.get("types")
        dtypes: dict[tuple[int, int], str] = {}
        pieces = []
        rows: list[Any] = self._rows("pieces", 9)
        for at, row in enumerate(rows):
            rows[at] = None
            for place in (0, 1, 2, 5, 6, 7, 8):
                if type(row[place]) is not int or not 0 <= row[place] <= _LARGEST_NUMBER:
                    self._number(row[place], "an index" if place in (0, 1, 2, 7) else "a piece")
            name, shape = self._entry(tensors, row[0])
            kind, dtype = as_kind(self._entry(kinds, row[1])), self._entry(types, row[2])
            if kind is None or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
                self._refuse(f"tensor {name} has unknown kind or element type {printable(dtype)}")
            file = self._entry(files, row[7])
            start, stop = self._numbers(row[3], f"start of {name}"), self._numbers(row[4], f"stop of {name}")
            key = PieceKey(name, kind, shape, start, stop, row[5], row[6])
            problem = key_problem(key)
            if problem is not None:
                self._refuse(f"a piece of tensor {name}: {problem}")
            piece = StoredPiece(key, dtype, ITEM_BYTES[dtype], row[7], row[8])
            if piece.end_bytes > file.size_bytes:
                self._refuse(f"a piece of tensor {name} ends at byte {piece.end_bytes} of {file.name}, beyond its end")
            if dtypes.setdefault((row[0], row[1]), dtype) != dtype:
                self._refuse(f"the pieces of tensor {name} ({kind}) have different element types")
            pieces.append(piece)
        return tuple(pieces)

    def _check_files(self, files: tuple[StoredFile, ...], pieces: tuple[StoredPiece, ...]) -> None:
        """In every file the pieces must be contiguous, from the end of its header to its end."""
        file = np.array([piece.file for piece in pieces], dtype=np.int64)
        begin = np.array([piece.begin_bytes for piece in pieces], dtype=np.int64)
        end = np.array([piece.end_bytes for piece in pieces], dtype=np.int64)
        order = np.lexsort((begin, file))
        file, begin, end = file[order], begin[order], end[order]
        firsts = np.flatnonzero(np.diff(file, prepend=-1))
        held = set(file[firsts].tolist())
        for number, stored in enumerate(files):
            if number not in held:
                self._refuse(f"no piece lies in {stored.name}")
        expected = np.concatenate([[0], end[:-1]])
        expected[firsts] = begin[firsts]
        wrong = np.flatnonzero(begin != expected)
        if wrong.size:
            at = int(wrong[0])
            piece, place = pieces[int(order[at])], int(begin[at])
            what = "overlaps the one before it" if place < expected[at] else "leaves a hole before it"
            name = files[piece.file].name
            self._refuse(f"the piece of tensor {piece.key.name} at byte {place} of {name} {what}")
        for at in firsts[begin[firsts] < _LEAST_HEADER_BYTES].tolist():
            piece = pieces[int(order[at])]
            name = files[piece.file].name
            self._refuse(f"the piece of tensor {piece.key.name} at byte {int(begin[at])} lies in the header of {name}")
        for at in [*(firsts[1:] - 1).tolist(), *([len(end) - 1] if len(end) else [])]:
            stored = files[int(file[at])]
            if end[at] != stored.size_bytes:
                self._refuse(f"{stored.name} has {stored.size_bytes} bytes, but its pieces end at byte {int(end[at])}")

    def _check_tensors(self, tensors: list[tuple[str, tuple[int, ...]]], pieces: tuple[StoredPiece, ...]) -> None:
        """Pieces must make up whole tensors, else an older checkpoint is the better one."""
        held = {piece.key.name for piece in pieces}
        for name, _ in tensors:
            if name not in held:
                self._refuse(f"no piece of tensor {name} is in any file")
        if not pieces:
            self._refuse("it lists no pieces")
        try:
            check_complete(piece.key for piece in pieces)
        except CheckpointError as failure:
            raise DamagedError(f"{self.path} is not whole: {failure} Use another checkpoint.") from failure

    def _rows(self, name: str, width: int) -> list[list[Any]]:
        rows = self.values.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == width for row in rows):
            self._refuse(f"{name} is not a list of rows of {width}")
        return rows

    def _entry(self, table: Any, number: int) -> Any:
        if not isinstance(table, list | tuple) or number >= len(table):
            self._refuse(f"index {number} points beyond its table")
        return table[number]

    def _numbers(self, values: Any, what: str) -> tuple[int, ...]:
        if not isinstance(values, list) or len(values) > 16:
            self._refuse(f"{what} is not a list of numbers")
        product = 1
        for value in values:
            if type(value) is not int or value < 0:
                self._number(value, what)
            product *= max(1, value)
        if product > _LARGEST_NUMBER:
            self._refuse(f"{what} is too large")
        return tuple(values)

    def _number(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value <= _LARGEST_NUMBER:
            self._refuse(f"{what} is {printable(value)}, not an integer in range")
        return value

    def _refuse(self, problem: str) -> NoReturn:
        raise DamagedError(f"{self.path} is not a valid manifest: {problem}. Use another checkpoint.")
