"""What is stored of which tensor, and in which bytes of which file.

A run is consecutive parts of one box of a tensor, all of one length but the last, each in the next of a progression of
files: what thousands of ranks write of a parameter that is split evenly over them is one run. A piece that fits no
progression is a run of one part. The parts in a file lie side by side in the order of their runs, up to its end.
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

# Half precision stores the fp32 master only, fp32 the weight only: one can stand in for the other. The mean of weights
# begins with them.
_STAND_INS: dict[Kind, tuple[Kind, ...]] = {
    "weight": ("master",),
    "master": ("weight",),
    "average": ("master", "weight"),
}
_MOST_REMEMBERED = 2**23  # places in files, at 24 bytes: 4,096 files of ZeRO-3 for a network of 584 parameters


@dataclass(frozen=True)
class StoredPiece:
    """A piece in a file: `file` is the file's number in the manifest, `begin_bytes` the offset in it."""

    key: PieceKey
    dtype: str
    item_bytes: int
    file: int
    begin_bytes: int

    @property
    def end_bytes(self) -> int:
        """The first byte after the piece."""
        return self.begin_bytes + self.key.numel * self.item_bytes


@dataclass(frozen=True)
class StoredRun:
    """Part i of a box has the elements from `key.first + i * length` on and lies in file `file + i * step`.

    Attributes:
        key: the elements of all parts.
        length: elements of a part; the last one may be shorter.
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
        """The parts that hold elements of a flat range of the box."""
        first, last = max(first, self.key.first) - self.key.first, min(last, self.key.last) - self.key.first
        return range(first // self.length, -(-last // self.length)) if first < last else range(0)


@dataclass(frozen=True)
class CheckpointTensor:
    """One tensor of a checkpoint.

    Args:
        kinds: what is stored of it, with the element types as safetensors names them.
    """

    name: str
    shape: tuple[int, ...]
    kinds: Mapping[Kind, str]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def weight_kind(self) -> Kind:
        """The kind that holds its weights; the first of all if it has none."""
        return next((kind for kind in self.kinds if kind in ("weight", "master")), next(iter(self.kinds)))


@final
class Catalogue:
    """The runs of a checkpoint, found by tensor name and kind, and the place of every part.

    Args:
        size_of: the size in bytes of a file, by its number.
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
        self._remembered = 0  # places in `_places`
        self._places: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def tensors(self) -> dict[str, CheckpointTensor]:
        """All tensors by name, in the order of the files."""
        kinds: dict[str, dict[Kind, str]] = {}
        for run in self.runs:
            kinds.setdefault(run.key.name, {})[run.key.kind] = run.dtype
        return {name: CheckpointTensor(name, self.shape(name) or (), stored) for name, stored in kinds.items()}

    def names(self) -> list[str]:
        """The names of the stored tensors, each once, sorted."""
        return sorted({name for name, _ in self._numbers})

    def kinds(self, name: str) -> list[Kind]:
        return [kind for kind in KINDS if (name, kind) in self._numbers]

    def served_kind(self, name: str, kind: Kind) -> Kind | None:
        """The kind from which `kind` of this tensor is read: itself, its stand-in, or None when neither is stored."""
        return next((each for each in (kind, *_STAND_INS.get(kind, ())) if (name, each) in self._numbers), None)

    def shape(self, name: str) -> tuple[int, ...] | None:
        """The global shape of a stored tensor, or None when it is not stored."""
        return next((self.stored(name, kind)[0][1].key.shape for kind in self.kinds(name)), None)

    def dtype(self, name: str, kind: Kind) -> str:
        """The element type of what is stored of a tensor."""
        return self.stored(name, kind)[0][1].dtype

    def stored(self, name: str, kind: Kind) -> list[tuple[int, StoredRun]]:
        """The runs of a kind of a tensor, with their numbers."""
        return [(number, self.runs[number]) for number in self._numbers[name, kind]]

    def piece(self, number: int, part: int) -> StoredPiece:
        """A part of a run, by their numbers."""
        run = self.runs[number]
        file = run.file + part * run.step
        numbers, _, begins = self._places_in(file)
        return _stored(run, part, file, int(begins[np.searchsorted(numbers, number)]))

    def pieces_of(self, file: int) -> Iterator[StoredPiece]:
        for number, part, begin in zip(*(values.tolist() for values in self._places_in(file)), strict=True):
            yield _stored(self.runs[number], part, file, begin)

    def _places_in(self, file: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Of every run with a part in a file its number, the part's number and first byte, in the file's order."""
        if file not in self._places:
            distance = file - self._file
            part = distance // self._step
            numbers = np.flatnonzero((distance >= 0) & (distance % self._step == 0) & (part < self._parts))
            part = part[numbers]
            length = self._length[numbers]
            sizes = np.minimum(length, self._numel[numbers] - part * length) * self._item_bytes[numbers]
            begins = self._size_of(file) - np.cumsum(sizes[::-1])[::-1]
            if self._remembered > _MOST_REMEMBERED:
                self._places.clear()
                self._remembered = 0
            self._remembered += numbers.size
            self._places[file] = (numbers, part, begins)
        return self._places[file]


def _stored(run: StoredRun, part: int, file: int, begin_bytes: int) -> StoredPiece:
    return StoredPiece(run.part(part), run.dtype, ITEM_BYTES[run.dtype], file, begin_bytes)
