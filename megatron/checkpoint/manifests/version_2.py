"""Writes and reads format version 2: a root, in which a run of pieces has one row, and for many files index files.

Entries of the root, `manifest.json`, in order:
    format, format_version, step, run: the program's name for the format, 2, the step, a random name of the save.
    record: the caller's JSON object.
    chunk_bytes: files are hashed in chunks of this many bytes, the last one shorter.
    tensors: rows of global name, global shape. kinds, types: the words that pieces refer to by number.
    pieces: rows of tensor, kind and element type (numbers in these tables), box start, box stop, flat range in the box
        (first, last), file, and if the range has several parts: step, length. Part i has `length` elements from
        `first + i * length` on (the last part those that are left) and lies in file `file + i * step`. The parts in a
        file lie side by side in the order of these rows, up to its end. Values are little-endian and row-major.
    files: rows of name, size in bytes, SHA-256, list of the chunks' SHA-256; a file's number is that of its row.
    indexes: rows of name, size in bytes, SHA-256 and number of files of the index files that hold the rows of files
        instead, in order: JSON objects with format, run and files. They are opened when one of their files is read.
    digest: SHA-256 of everything before this entry.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

import numpy as np
import numpy.typing as npt

from megatron.checkpoint.catalogue import ITEM_BYTES, KINDS, Catalogue, StoredRun
from megatron.checkpoint.manifests.checked_rows import LARGEST_NUMBER, LEAST_HEADER_BYTES, CheckedRows, Tensors
from megatron.checkpoint.manifests.contents import IndexedFiles, IndexFile, Manifest, StoredFile
from megatron.checkpoint.manifests.texts import check_size, parsed, read_whole, sealed
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, DamagedError, printable

FORMAT = "megatron-pieces"
FORMAT_VERSION = 2

_INDEX_FORMAT = "megatron-pieces-index"
_MOST_ROOT_BYTES = 2**20  # of the rows of files; more go into index files
_MOST_INDEX_BYTES = 4 * 2**20
_MOST_INDEX_FILES = 1024
_MOST_FILES = 2**20
_MOST_PARTS = 2**27  # of runs that begin in different files or go through them in different steps
_INDEX_NAME = re.compile(r"index_[0-9]{5,7}\.json\Z")


def manifest_texts(
    step: int,
    run: str,
    record: Mapping[str, Any],
    chunk_bytes: int,
    files: Sequence[StoredFile],
    runs: Sequence[StoredRun],
) -> tuple[bytes, dict[str, bytes]]:
    """The text of a manifest and those of its index files, by name.

    Raises:
        CheckpointError: the record is not JSON.
    """
    rows = [_compact([file.name, file.size_bytes, file.sha256, file.chunks]) for file in files]
    indexes: dict[str, bytes] = {}
    index_rows: list[list[Any]] = []
    if sum(map(len, rows)) > _MOST_ROOT_BYTES:
        head = f'{{"format": {json.dumps(_INDEX_FORMAT)},\n"run": {json.dumps(run)},\n"files": '
        for part in _portions(rows):
            name, text = f"index_{len(indexes):05d}.json", f"{head}[{','.join(part)}]\n}}\n".encode()
            index_rows.append([name, len(text), hashlib.sha256(text).hexdigest(), len(part)])
            indexes[name] = text
        rows = []
    tensors: dict[tuple[str, tuple[int, ...]], int] = {}
    pieces = [_row(stored, tensors) for stored in runs]
    head_lines = {"format": FORMAT, "format_version": FORMAT_VERSION, "step": step, "run": run}
    lines = [f"{json.dumps(name)}: {_compact(value)}" for name, value in head_lines.items()]
    lines.append(f'"record": {record_text(record)}')
    tables = {"tensors": list(tensors), "kinds": KINDS, "types": list(ITEM_BYTES), "pieces": pieces}
    lines += [
        f"{json.dumps(name)}: {_compact(value)}" for name, value in {"chunk_bytes": chunk_bytes, **tables}.items()
    ]
    lines += [f'"files": [{",".join(rows)}]', f'"indexes": {_compact(index_rows)}']
    return sealed(("{\n" + ",\n".join(lines) + ",\n").encode()), indexes


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


def read_version_2(path: Path, values: dict[str, Any], digest: str, storage: Storage) -> Manifest:
    """The manifest in a parsed text; its index files are not opened.

    Raises:
        DamagedError: something in it cannot be.
    """
    return _Version2(path, values).manifest(digest, storage)


def read_index(folder: Path, index: IndexFile, storage: Storage) -> bytearray:
    """The text of an index file, whose digest is right.

    Raises:
        DamagedError: it is missing or was changed.
        StorageError: the system refused for a reason that has nothing to do with the file.
    """
    path = folder / index.name
    text = read_whole(storage, path)
    if len(text) != index.size_bytes or hashlib.sha256(text).hexdigest() != index.sha256:
        raise DamagedError(
            f"{path} is damaged: it is not the index file that its manifest describes. Use another checkpoint."
        )
    return text


def _compact(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"))


def _portions(rows: Sequence[str]) -> Iterator[list[str]]:
    """Consecutive rows that go into one index file each."""
    portion: list[str] = []
    size = 0
    for row in rows:
        if portion and (len(portion) == _MOST_INDEX_FILES or size + len(row) > _MOST_INDEX_BYTES):
            yield portion
            portion, size = [], 0
        portion.append(row)
        size += len(row)
    yield portion


def _row(stored: StoredRun, tensors: dict[tuple[str, tuple[int, ...]], int]) -> list[Any]:
    key = stored.key
    tensor = tensors.setdefault((key.name, key.shape), len(tensors))
    kind, dtype = KINDS.index(key.kind), list(ITEM_BYTES).index(stored.dtype)
    row = [tensor, kind, dtype, key.start, key.stop, key.first, key.last, stored.file]
    return [*row, stored.step, stored.length] if stored.parts > 1 else row


@final
class _Version2(CheckedRows):
    def manifest(self, digest: str, storage: Storage) -> Manifest:
        step, run, record, chunk_bytes = self.head()
        indexes, tensors = self._indexes(storage), self.tensors()
        in_root = self.files(chunk_bytes)
        if indexes and in_root:
            self.refuse("it has files and index files; one of both must be empty")
        count = len(in_root) or sum(index.file_count for index in indexes)
        if count > _MOST_FILES:
            self.refuse(f"it has {count} files; {_MOST_FILES} are allowed")
        runs = self._runs(count, tensors)
        self.check_tensors(tensors, runs)
        held_bytes = self._held_bytes(count, runs)
        self._check_held(in_root, held_bytes)

        def open_index(number: int, first: int) -> tuple[StoredFile, ...]:
            path, index = self.path.parent / indexes[number].name, indexes[number]
            part = _Version2(path, parsed(path, read_index(path.parent, index, storage), storage))
            return part.index(run, chunk_bytes, held_bytes[first : first + index.file_count])

        files = IndexedFiles(indexes, open_index) if indexes else in_root
        catalogue = Catalogue(runs, lambda file: files[file].size_bytes)
        return Manifest(step, run, record, chunk_bytes, files, catalogue, digest, indexes)

    def index(self, run: str, chunk_bytes: int, held_bytes: npt.NDArray[np.int64]) -> tuple[StoredFile, ...]:
        """The files in an index file."""
        if self.values.get("format") != _INDEX_FORMAT or self.values.get("run") != run:
            self.refuse("it is not an index file of this checkpoint")
        files = self.files(chunk_bytes)
        if len(files) != len(held_bytes):
            self.refuse(f"it has {len(files)} files and should have {len(held_bytes)}")
        self._check_held(files, held_bytes)
        return files

    def _indexes(self, storage: Storage) -> tuple[IndexFile, ...]:
        indexes = []
        for name, size, digest, count in self.rows("indexes", (4,)):
            if not isinstance(name, str) or not _INDEX_NAME.match(name):
                self.refuse(f"index file name {printable(name)} is not of the form index_00000.json")
            if self.number(count, f"number of files in {name}") == 0:
                self.refuse(f"{name} has no files")
            indexes.append(IndexFile(name, self.number(size, f"size of {name}"), self.digest(digest, name), count))
        if len({index.name for index in indexes}) != len(indexes):
            self.refuse("an index file appears twice")
        check_size(storage, self.path, sum(index.size_bytes for index in indexes))
        return tuple(indexes)

    def _runs(self, file_count: int, tensors: Tensors) -> list[StoredRun]:
        """Reads the runs; each row is given up as soon as it is read, so that not all are in memory twice."""
        runs: list[StoredRun] = []
        rows: list[Any] = self.rows("pieces", (8, 10))
        for at, row in enumerate(rows):
            rows[at] = None
            key, dtype = self.described(row, tensors)
            numbers = [self.number(value, "an index") for value in row[7:]]
            file, step, length = numbers if len(numbers) == 3 else (numbers[0], 1, key.numel)
            if not 0 < length <= key.numel or not step:
                self.refuse(
                    f"a piece of tensor {key.name} of {key.numel} elements has parts of {length} in steps of {step}"
                )
            run = StoredRun(key, dtype, file, step, length)
            if file + (run.parts - 1) * step >= file_count:
                self.refuse(f"index {file + (run.parts - 1) * step} points beyond its table")
            runs.append(run)
        return runs

    def _held_bytes(self, file_count: int, runs: Sequence[StoredRun]) -> npt.NDArray[np.int64]:
        """The bytes that all pieces in each file take."""
        if sum(run.key.numel * ITEM_BYTES[run.dtype] for run in runs) > LARGEST_NUMBER:
            self.refuse("its pieces take more bytes than there are numbers for")
        progressions: dict[tuple[int, int, int], int] = {}
        for run in runs:
            last = run.part(run.parts - 1).numel
            for progression, length in (
                ((run.file, run.step, run.parts - 1), run.length),
                ((run.file + (run.parts - 1) * run.step, 1, 1), last),
            ):
                progressions[progression] = progressions.get(progression, 0) + length * ITEM_BYTES[run.dtype]
        if sum(parts for _, _, parts in progressions) > _MOST_PARTS:
            self.refuse(f"its pieces go through the files in {len(progressions)} ways, which no layout does")
        held = np.zeros(file_count, dtype=np.int64)
        for (file, step, parts), size_bytes in progressions.items():
            held[file : file + parts * step : step] += size_bytes
        return held

    def _check_held(self, files: Sequence[StoredFile], held_bytes: npt.NDArray[np.int64]) -> None:
        """In every file there must be pieces, and room for its header before them."""
        for file, held in zip(files, held_bytes.tolist(), strict=False):
            if not held:
                self.refuse(f"no piece lies in {file.name}")
            if file.size_bytes - held < LEAST_HEADER_BYTES:
                self.refuse(f"{file.name} has {file.size_bytes} bytes, and its pieces and header take more than that")
