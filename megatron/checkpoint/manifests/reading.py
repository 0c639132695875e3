"""Reads a manifest: converts its parsed JSON into values, and rejects anything that this program does not write."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, final

import numpy as np
import numpy.typing as npt

from megatron.checkpoint.catalogue import ITEM_BYTES, Catalogue, StoredRun
from megatron.checkpoint.checks import check_extent
from megatron.checkpoint.layout import as_kind, check_complete, key_problem
from megatron.checkpoint.manifests.contents import IndexedFiles, IndexFile, Manifest, StoredFile
from megatron.checkpoint.manifests.texts import check_size, parsed, read_whole
from megatron.checkpoint.manifests.writing import INDEX_FORMAT
from megatron.checkpoint.storage import Storage
from megatron.errors import CheckpointError, DamagedError, printable
from megatron.parallel.pieces import PieceKey

_LARGEST_NUMBER = 2**62
_LEAST_HEADER_BYTES = 10  # of a safetensors file: the length of its header, and {}
_MOST_FILES = 2**20
_MOST_PARTS = 2**27  # of runs that start in different files or have different steps
_LONGEST_NAME = 500
_FILE_NAME = re.compile(r"pieces_[0-9]{5,7}\.safetensors\Z")
_INDEX_NAME = re.compile(r"index_[0-9]{5,7}\.json\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Tensors = Sequence[tuple[str, tuple[int, ...]]]


def read_values(path: Path, values: dict[str, Any], digest: str, storage: Storage) -> Manifest:
    """The manifest in a parsed text; its index files are not opened.

    Raises:
        DamagedError: an entry is invalid.
    """
    return _Rows(path, values).manifest(digest, storage)


def read_index(folder: Path, index: IndexFile, storage: Storage) -> bytearray:
    """The verified text of an index file.

    Raises:
        DamagedError: it is missing or was modified.
        StorageError: the system refused to read it, for a reason unrelated to the file.
    """
    path = folder / index.name
    text = read_whole(storage, path)
    if len(text) != index.size_bytes or hashlib.sha256(text).hexdigest() != index.sha256:
        raise DamagedError(f"{path} is damaged: it does not match the digest in the manifest. Use another checkpoint.")
    return text


@final
class _Rows:
    """The tables of a manifest or of an index file."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def manifest(self, digest: str, storage: Storage) -> Manifest:
        step, run, record, chunk_bytes = self._head()
        indexes, tensors = self._indexes(storage), self._tensors()
        in_root = self._files(chunk_bytes)
        if indexes and in_root:
            self._refuse("it has both files and index files")
        count = len(in_root) or sum(index.file_count for index in indexes)
        if count > _MOST_FILES:
            self._refuse(f"it has {count} files; {_MOST_FILES} are allowed")
        runs = self._runs(count, tensors)
        self._check_tensors(tensors, runs)
        held_bytes = self._held_bytes(count, runs)
        self._check_held(in_root, held_bytes)

        def open_index(number: int, first: int) -> tuple[StoredFile, ...]:
            path, index = self.path.parent / indexes[number].name, indexes[number]
            part = _Rows(path, parsed(path, read_index(path.parent, index, storage), storage))
            return part._index(run, chunk_bytes, held_bytes[first : first + index.file_count])

        files = IndexedFiles(indexes, open_index) if indexes else in_root
        catalogue = Catalogue(runs, lambda file: files[file].size_bytes)
        return Manifest(step, run, record, chunk_bytes, files, catalogue, digest, indexes)

    def _index(self, run: str, chunk_bytes: int, held_bytes: npt.NDArray[np.int64]) -> tuple[StoredFile, ...]:
        if self.values.get("format") != INDEX_FORMAT or self.values.get("run") != run:
            self._refuse("it is not an index file of this checkpoint")
        files = self._files(chunk_bytes)
        if len(files) != len(held_bytes):
            self._refuse(f"it has {len(files)} files and should have {len(held_bytes)}")
        self._check_held(files, held_bytes)
        return files

    def _indexes(self, storage: Storage) -> tuple[IndexFile, ...]:
        indexes = []
        for name, size, digest, count in self._rows("indexes", (4,)):
            if not isinstance(name, str) or not _INDEX_NAME.match(name):
                self._refuse(f"index file name {printable(name)} is not of the form index_00000.json")
            if self._number(count, f"number of files in {name}") == 0:
                self._refuse(f"{name} has no files")
            indexes.append(IndexFile(name, self._number(size, f"size of {name}"), self._digest(digest, name), count))
        if len({index.name for index in indexes}) != len(indexes):
            self._refuse("an index file appears twice")
        check_size(storage, self.path, sum(index.size_bytes for index in indexes))
        return tuple(indexes)

    def _runs(self, file_count: int, tensors: Tensors) -> list[StoredRun]:
        """Reads the runs; frees each row as soon as it is read, so that the table is not in memory twice."""
        runs: list[StoredRun] = []
        rows: list[Any] = self._rows("pieces", (8, 10))
        for index, row in enumerate(rows):
            rows[index] = None
            key, dtype = self._described(row, tensors)
            numbers = [self._number(value, "an index") for value in row[7:]]
            file, step, length = numbers if len(numbers) == 3 else (numbers[0], 1, key.numel)
            if not 0 < length <= key.numel or not step:
                self._refuse(
                    f"a piece of tensor {key.name} of {key.numel} elements has parts of {length} in steps of {step}"
                )
            run = StoredRun(key, dtype, file, step, length)
            if file + (run.parts - 1) * step >= file_count:
                self._refuse(f"index {file + (run.parts - 1) * step} is out of range")
            runs.append(run)
        return runs

    def _held_bytes(self, file_count: int, runs: Sequence[StoredRun]) -> npt.NDArray[np.int64]:
        if sum(run.key.numel * ITEM_BYTES[run.dtype] for run in runs) > _LARGEST_NUMBER:
            self._refuse("the total size of its pieces is out of range")
        progressions: dict[tuple[int, int, int], int] = {}
        for run in runs:
            last = run.part(run.parts - 1).numel
            for progression, length in (
                ((run.file, run.step, run.parts - 1), run.length),
                ((run.file + (run.parts - 1) * run.step, 1, 1), last),
            ):
                progressions[progression] = progressions.get(progression, 0) + length * ITEM_BYTES[run.dtype]
        if sum(parts for _, _, parts in progressions) > _MOST_PARTS:
            self._refuse(f"its pieces have {len(progressions)} sequences of files, more than any layout needs")
        held = np.zeros(file_count, dtype=np.int64)
        for (file, step, parts), size_bytes in progressions.items():
            held[file : file + parts * step : step] += size_bytes
        return held

    def _check_held(self, files: Sequence[StoredFile], held_bytes: npt.NDArray[np.int64]) -> None:
        """Checks that every file has pieces, and space for its header before them."""
        for file, held in zip(files, held_bytes.tolist(), strict=False):
            if not held:
                self._refuse(f"{file.name} has no pieces")
            if file.size_bytes - held < _LEAST_HEADER_BYTES:
                self._refuse(f"{file.name} has {file.size_bytes} bytes, less than its pieces and header take")

    def _head(self) -> tuple[int, str, dict[str, Any], int]:
        """Step, run, record and chunk size in bytes."""
        record = self.values.get("record")
        if not isinstance(record, dict):
            self._refuse("record is not an object")
        try:
            check_extent(record)
        except ValueError as failure:
            raise DamagedError(f"{self.path} is not a manifest: {failure}. Use another checkpoint.") from failure
        chunk_bytes = self._number(self.values.get("chunk_bytes"), "chunk_bytes")
        if not 64 <= chunk_bytes <= 2**30:
            self._refuse(f"chunk_bytes is {chunk_bytes}")
        run = self.values.get("run")
        if not isinstance(run, str) or len(run) > _LONGEST_NAME:
            self._refuse(f"run is {printable(run)}, not a name")
        return self._number(self.values.get("step"), "step"), run, record, chunk_bytes

    def _files(self, chunk_bytes: int) -> tuple[StoredFile, ...]:
        files = tuple(self._file(row, chunk_bytes) for row in self._rows("files", (4,)))
        if len({file.name for file in files}) != len(files):
            self._refuse("a file appears twice")
        return files

    def _tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        tensors = [self._tensor(row) for row in self._rows("tensors", (2,))]
        if len({name for name, _ in tensors}) != len(tensors):
            self._refuse("a tensor appears twice")
        return tensors

    def _described(self, row: list[Any], tensors: Tensors) -> tuple[PieceKey, str]:
        """Key and element type of a row that begins with tensor, kind, element type, start, stop, first, last."""
        for column in (0, 1, 2, 5, 6):
            if type(row[column]) is not int or not 0 <= row[column] <= _LARGEST_NUMBER:
                self._number(row[column], "an index" if column in (0, 1, 2) else "a piece")
        name, shape = self._entry(tensors, row[0])
        kind, dtype = (
            as_kind(self._entry(self.values.get("kinds"), row[1])),
            self._entry(self.values.get("types"), row[2]),
        )
        if kind is None or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            self._refuse(f"tensor {name} has unknown kind or element type {printable(dtype)}")
        start, stop = self._numbers(row[3], f"start of {name}"), self._numbers(row[4], f"stop of {name}")
        key = PieceKey(name, kind, shape, start, stop, row[5], row[6])
        problem = key_problem(key)
        if problem is not None:
            self._refuse(f"a piece of tensor {name}: {problem}")
        return key, dtype

    def _check_tensors(self, tensors: Tensors, runs: Sequence[StoredRun]) -> None:
        """Checks that the pieces cover whole tensors."""
        names = {run.key.name for run in runs}
        for name, _ in tensors:
            if name not in names:
                self._refuse(f"tensor {name} has no pieces")
        if not runs:
            self._refuse("it lists no pieces")
        types: dict[tuple[str, str], str] = {}
        for run in runs:
            name, kind = run.key.name, run.key.kind
            if types.setdefault((name, kind), run.dtype) != run.dtype:
                self._refuse(f"the pieces of tensor {name} ({kind}) have different element types")
        try:
            check_complete(run.key for run in runs)
        except CheckpointError as failure:
            raise DamagedError(f"{self.path} is incomplete: {failure} Use another checkpoint.") from failure

    def _rows(self, name: str, widths: tuple[int, ...]) -> list[list[Any]]:
        rows = self.values.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) in widths for row in rows):
            self._refuse(f"{name} is not a list of rows of {' or '.join(map(str, widths))}")
        return rows

    def _entry(self, table: Any, number: int) -> Any:
        if not isinstance(table, list | tuple) or number >= len(table):
            self._refuse(f"index {number} is out of range")
        return table[number]

    def _number(self, value: Any, what: str) -> int:
        if type(value) is not int or not 0 <= value <= _LARGEST_NUMBER:
            self._refuse(f"{what} is {printable(value)}, not an integer in range")
        return value

    def _digest(self, value: Any, name: str) -> str:
        if not isinstance(value, str) or not _DIGEST.match(value):
            self._refuse(f"{printable(value)} is not a SHA-256 digest of {name}")
        return value

    def _refuse(self, problem: str) -> NoReturn:
        raise DamagedError(f"{self.path} is not a valid manifest: {problem}. Use another checkpoint.")

    def _file(self, row: list[Any], chunk_bytes: int) -> StoredFile:
        name, size, digest, chunks = row
        if not isinstance(name, str) or not _FILE_NAME.match(name):
            self._refuse(f"file name {printable(name)} is not of the form pieces_00000.safetensors")
        size_bytes = self._number(size, f"size of {name}")
        if not isinstance(chunks, list) or len(chunks) != -(-size_bytes // chunk_bytes):
            self._refuse(f"{name} has {size_bytes} bytes, which does not match its number of chunk digests")
        for text in chunks:
            self._digest(text, name)
        return StoredFile(name, size_bytes, self._digest(digest, name), tuple(chunks))

    def _tensor(self, row: list[Any]) -> tuple[str, tuple[int, ...]]:
        name, shape = row
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            self._refuse(f"tensor name {printable(name)} is not a string of up to {_LONGEST_NAME} printable characters")
        return name, self._numbers(shape, f"shape of {name}")

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
