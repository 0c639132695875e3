"""The index of a checkpoint: the file and byte offset of every stored piece of every tensor.

A run is a sequence of consecutive parts of one box of a tensor, of equal length except the last, in files whose numbers
form an arithmetic progression: a parameter that is split evenly over thousands of ranks is one run. A piece that fits
no progression is a run of one part. The parts in a file are contiguous, in the order of their runs, up to its end.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import final

import numpy as np
import numpy.typing as npt

from megatron.parallel.pieces import Kind, PieceKey

KINDS: tuple[Kind, ...] = ("weight", "master", "exp_avg", "exp_avg_sq", "average")
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

# Half precision stores only the fp32 master, fp32 only the weight: each substitutes for the other. An average of the
# weights starts from the weights.
_SUBSTITUTES: dict[Kind, tuple[Kind, ...]] = {
    "weight": ("master",),
    "master": ("weight",),
    "average": ("master", "weight"),
}
_MOST_CACHED = 2**23  # entries of 24 bytes: 4,096 files of ZeRO-3 for a network of 584 parameters


@dataclass(frozen=True)
class StoredPiece:
    """A piece in a file: `file` is its number in the manifest, `begin_bytes` the offset in it."""

    key: PieceKey
    dtype: str
    item_bytes: int
    file: int
    begin_bytes: int

    @property
    def end_bytes(self) -> int:
        return self.begin_bytes + self.key.numel * self.item_bytes


@dataclass(frozen=True)
class StoredRun:
    """Parts of a box: part i starts at element `key.first + i * length` and is in file `file + i * step`.

    Attributes:
        key: the elements of all parts.
        length: elements per part; the last one may be shorter.
    """

    key: PieceKey
    dtype: str
    file: int
    step: int
    length: int

    @property
    def parts(self) -> int:
        return -(-self.key.numel // self.length)

    def part(self, number: int) -> PieceKey:
        return self.key.narrowed(number * self.length, min((number + 1) * self.length, self.key.numel))

    def parts_within(self, first: int, last: int) -> range:
        """The parts that overlap a flat range of the box."""
        first, last = max(first, self.key.first) - self.key.first, min(last, self.key.last) - self.key.first
        return range(first // self.length, -(-last // self.length)) if first < last else range(0)


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint.

    Args:
        kinds: the stored kinds with their element types, as safetensors names them.
    """

    name: str
    shape: tuple[int, ...]
    kinds: Mapping[Kind, str]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def weight_kind(self) -> Kind:
        """The kind that holds its weights; the first kind if there is none."""
        return next((kind for kind in self.kinds if kind in ("weight", "master")), next(iter(self.kinds)))


@final
class Catalogue:
    """The runs of a checkpoint by tensor name and kind, and the file and offset of every part.

    Args:
        size_of: returns the size in bytes of a file, by number.
    """

    def __init__(self, runs: Sequence[StoredRun], size_of: Callable[[int], int]) -> None:
        self.runs = runs
        self._size_of = size_of
        self._numbers: dict[tuple[str, Kind], list[int]] = {}
        for number, run in enumerate(runs):
            self._numbers.setdefault((run.key.name, run.key.kind), []).append(number)
        self._file = np.array([run.file for run in runs], dtype=np.int64)
        self._step = np.array([run.step for run in runs], dtype=np.int64)
        self._parts = np.array([run.parts for run in runs], dtype=np.int64)
        self._length = np.array([run.length for run in runs], dtype=np.int64)
        self._numel = np.array([run.key.numel for run in runs], dtype=np.int64)
        self._item_bytes = np.array([ITEM_BYTES[run.dtype] for run in runs], dtype=np.int64)
        self._cached = 0  # entries in `_parts_by_file`
        self._parts_by_file: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def tensors(self) -> dict[str, CheckpointTensor]:
        """All tensors by name, in the order of the files."""
        kinds: dict[str, dict[Kind, str]] = {}
        for run in self.runs:
            kinds.setdefault(run.key.name, {})[run.key.kind] = run.dtype
        return {name: CheckpointTensor(name, self.shape(name) or (), stored) for name, stored in kinds.items()}

    def names(self) -> list[str]:
        return sorted({name for name, _ in self._numbers})

    def kinds(self, name: str) -> list[Kind]:
        return [kind for kind in KINDS if (name, kind) in self._numbers]

    def source_kind(self, name: str, kind: Kind) -> Kind | None:
        """The kind to read for `kind` of this tensor: itself or a substitute; None if neither is stored."""
        return next((each for each in (kind, *_SUBSTITUTES.get(kind, ())) if (name, each) in self._numbers), None)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The global shape of a stored tensor; None if it is not stored."""
        return next((self.stored(name, kind)[0][1].key.shape for kind in self.kinds(name)), None)

    def dtype(self, name: str, kind: Kind) -> str:
        return self.stored(name, kind)[0][1].dtype

    def stored(self, name: str, kind: Kind) -> list[tuple[int, StoredRun]]:
        """The runs of a kind of a tensor, with their numbers."""
        return [(number, self.runs[number]) for number in self._numbers[name, kind]]

    def piece(self, number: int, part: int) -> StoredPiece:
        """A part of a run, by their numbers."""
        run = self.runs[number]
        file = run.file + part * run.step
        numbers, _, offsets = self._parts_in(file)
        return _stored(run, part, file, int(offsets[np.searchsorted(numbers, number)]))

    def pieces_of(self, file: int) -> Iterator[StoredPiece]:
        for number, part, offset in zip(*(values.tolist() for values in self._parts_in(file)), strict=True):
            yield _stored(self.runs[number], part, file, offset)

    def _parts_in(self, file: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Run number, part number and byte offset of every part in a file, in the order of the file."""
        if file not in self._parts_by_file:
            distance = file - self._file
            part = distance // self._step
            numbers = np.flatnonzero((distance >= 0) & (distance % self._step == 0) & (part < self._parts))
            part = part[numbers]
            length = self._length[numbers]
            sizes = np.minimum(length, self._numel[numbers] - part * length) * self._item_bytes[numbers]
            offsets = self._size_of(file) - np.cumsum(sizes[::-1])[::-1]
            if self._cached > _MOST_CACHED:
                self._parts_by_file.clear()
                self._cached = 0
            self._cached += numbers.size
            self._parts_by_file[file] = (numbers, part, offsets)
        return self._parts_by_file[file]


def _stored(run: StoredRun, part: int, file: int, begin_bytes: int) -> StoredPiece:
    return StoredPiece(run.part(part), run.dtype, ITEM_BYTES[run.dtype], file, begin_bytes)
