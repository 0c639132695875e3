"""Turns the parsed JSON of a manifest into values, and refuses what cannot be."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from megatron.checkpoint.catalogue import ITEM_BYTES, StoredRun
from megatron.checkpoint.checks import check_extent
from megatron.checkpoint.layout import as_kind, check_complete, key_problem
from megatron.checkpoint.manifests.contents import StoredFile
from megatron.errors import CheckpointError, DamagedError, printable
from megatron.parallel.pieces import PieceKey

LARGEST_NUMBER = 2**62
LEAST_HEADER_BYTES = 10  # of a safetensors file: the length of its header, and {}

_LONGEST_NAME = 500
_FILE_NAME = re.compile(r"pieces_[0-9]{5,7}\.safetensors\Z")
_DIGEST = re.compile(r"[0-9a-f]{64}\Z")

Tensors = Sequence[tuple[str, tuple[int, ...]]]


class CheckedRows:
    """The parts of a manifest: numbers, names, files, tensors and the descriptions of pieces."""

    def __init__(self, path: Path, values: dict[str, Any]) -> None:
        self.path = path
        self.values = values

    def head(self) -> tuple[int, str, dict[str, Any], int]:
        """Step, run, record and bytes of a chunk."""
        record = self.values.get("record")
        if not isinstance(record, dict):
            self.refuse("record is not an object")
        try:
            check_extent(record)
        except ValueError as failure:
            raise DamagedError(f"{self.path} is not a manifest: {failure}. Use another checkpoint.") from failure
        chunk_bytes = self.number(self.values.get("chunk_bytes"), "chunk_bytes")
        if not 64 <= chunk_bytes <= 2**30:
            self.refuse(f"chunk_bytes is {chunk_bytes}")
        run = self.values.get("run")
        if not isinstance(run, str) or len(run) > _LONGEST_NAME:
            self.refuse(f"run is {printable(run)}, not a name")
        return self.number(self.values.get("step"), "step"), run, record, chunk_bytes

    def files(self, chunk_bytes: int) -> tuple[StoredFile, ...]:
        """The entries of files."""
        files = tuple(self._file(row, chunk_bytes) for row in self.rows("files", (4,)))
        if len({file.name for file in files}) != len(files):
            self.refuse("a file appears twice")
        return files

    def tensors(self) -> list[tuple[str, tuple[int, ...]]]:
        """Name and shape of every tensor."""
        tensors = [self._tensor(row) for row in self.rows("tensors", (2,))]
        if len({name for name, _ in tensors}) != len(tensors):
            self.refuse("a tensor appears twice")
        return tensors

    def described(self, row: list[Any], tensors: Tensors) -> tuple[PieceKey, str]:
        """Key and element type of a row that begins with tensor, kind, element type, start, stop, first, last."""
        for place in (0, 1, 2, 5, 6):
            if type(row[place]) is not int or not 0 <= row[place] <= LARGEST_NUMBER:
                self.number(row[place], "an index" if place in (0, 1, 2) else "a piece")
        name, shape = self.entry(tensors, row[0])
        kind, dtype = (
            as_kind(self.entry(self.values.get("kinds"), row[1])),
            self.entry(self.values.get("types"), row[2]),
        )
        if kind is None or not isinstance(dtype, str) or dtype not in ITEM_BYTES:
            self.refuse(f"tensor {name} has unknown kind or element type {printable(dtype)}")
        start, stop = self._numbers(row[3], f"start of {name}"), self._numbers(row[4], f"stop of {name}")
        key = PieceKey(name, kind, shape, start, stop, row[5], row[6])
        problem = key_problem(key)
        if problem is not None:
            self.refuse(f"a piece of tensor {name}: {problem}")
        return key, dtype

    def check_tensors(self, tensors: Tensors, runs: Sequence[StoredRun]) -> None:
        """Pieces must make up whole tensors, else an older checkpoint is the better one."""
        held = {run.key.name for run in runs}
        for name, _ in tensors:
            if name not in held:
                self.refuse(f"no piece of tensor {name} is in any file")
        if not runs:
            self.refuse("it lists no pieces")
        types: dict[tuple[str, str], str] = {}
        for run in runs:
            name, kind = run.key.name, run.key.kind
            if types.setdefault((name, kind), run.dtype) != run.dtype:
                self.refuse(f"the pieces of tensor {name} ({kind}) have different element types")
        try:
            check_complete(run.key for run in runs)
        except CheckpointError as failure:
            raise DamagedError(f"{self.path} is not whole: {failure} Use another checkpoint.") from failure

    def rows(self, name: str, widths: tuple[int, ...]) -> list[list[Any]]:
        """A table of the manifest."""
        rows = self.values.get(name)
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) in widths for row in rows):
            self.refuse(f"{name} is not a list of rows of {' or '.join(map(str, widths))}")
        return rows

    def entry(self, table: Any, number: int) -> Any:
        """An entry of a table."""
        if not isinstance(table, list | tuple) or number >= len(table):
            self.refuse(f"index {number} points beyond its table")
        return table[number]

    def number(self, value: Any, what: str) -> int:
        """A number in range."""
        if type(value) is not int or not 0 <= value <= LARGEST_NUMBER:
            self.refuse(f"{what} is {printable(value)}, not an integer in range")
        return value

    def digest(self, value: Any, name: str) -> str:
        """A SHA-256 digest."""
        if not isinstance(value, str) or not _DIGEST.match(value):
            self.refuse(f"{printable(value)} is not a SHA-256 digest of {name}")
        return value

    def refuse(self, problem: str) -> NoReturn:
        """Raises the error for something that no program of ours has written."""
        raise DamagedError(f"{self.path} is not a valid manifest: {problem}. Use another checkpoint.")

    def _file(self, row: list[Any], chunk_bytes: int) -> StoredFile:
        name, size, digest, chunks = row
        if not isinstance(name, str) or not _FILE_NAME.match(name):
            self.refuse(f"file name {printable(name)} is not of the form pieces_00000.safetensors")
        size_bytes = self.number(size, f"size of {name}")
        if not isinstance(chunks, list) or len(chunks) != -(-size_bytes // chunk_bytes):
            self.refuse(f"{name} has {size_bytes} bytes, which does not fit its number of chunk digests")
        for text in chunks:
            self.digest(text, name)
        return StoredFile(name, size_bytes, self.digest(digest, name), tuple(chunks))

    def _tensor(self, row: list[Any]) -> tuple[str, tuple[int, ...]]:
        name, shape = row
        if not isinstance(name, str) or not 0 < len(name) <= _LONGEST_NAME or not name.isprintable():
            self.refuse(f"tensor name {printable(name)} is not a text of up to {_LONGEST_NAME} printable letters")
        return name, self._numbers(shape, f"shape of {name}")

    def _numbers(self, values: Any, what: str) -> tuple[int, ...]:
        if not isinstance(values, list) or len(values) > 16:
            self.refuse(f"{what} is not a list of numbers")
        product = 1
        for value in values:
            if type(value) is not int or value < 0:
                self.number(value, what)
            product *= max(1, value)
        if product > LARGEST_NUMBER:
            self.refuse(f"{what} is too large")
        return tuple(values)
