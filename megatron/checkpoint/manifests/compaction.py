"""Compacts the pieces written by all ranks into runs, in time and memory that do not grow with parameters x ranks.

Ranks that hold part n of every parameter write the same pieces except for n. So a rank describes its file by its part
numbers and by rows that refer to them; ranks with equal rows share one description. Files that differ, for example at
the ends of parameters that do not divide evenly, have their own, and their pieces are joined to the other runs here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Any

from megatron.checkpoint.catalogue import StoredPiece, StoredRun
from megatron.parallel.pieces import PieceKey

_MOST_SLOTS = 4  # part numbers of one rank, for parameters that are split over different axes

# A row: name, kind, shape, start, stop, element type, slot, length, numel. The piece has `numel` elements starting at
# `numbers[slot] * length`, or at `length` if the slot is -1.
Row = tuple[Any, ...]
_Node = tuple[Any, ...]


@dataclass(frozen=True)
class FileDescription:
    """The pieces of one file, in order.

    Attributes:
        numbers: the rank's part number for each slot.
        rows: see above; JSON-serializable.
    """

    numbers: tuple[int, ...]
    rows: tuple[Row, ...]

    @property
    def digest(self) -> str:
        """Equal for files that differ only in their part numbers."""
        return hashlib.sha256(json.dumps(self.rows).encode()).hexdigest()

    def keys(self) -> list[PieceKey]:
        return [_key(row, first, first + row[8]) for row in self.rows for first in [_first(row, self.numbers)]]


def describe(pieces: Iterable[StoredPiece]) -> FileDescription:
    numbers: list[int] = []
    rows = []
    for piece in pieces:
        key = piece.key
        slot, length = _slot(key.first, key.numel, numbers)
        rows.append((key.name, key.kind, key.shape, key.start, key.stop, piece.dtype, slot, length, key.numel))
    return FileDescription(tuple(numbers), tuple(rows))


def compact(
    numbers: Sequence[Sequence[int]], rows_of: Sequence[str], rows: Mapping[str, Sequence[Row]]
) -> list[StoredRun]:
    """The runs of all files, ordered consistently with the order of pieces in every file.

    Args:
        numbers: for each file, the numbers of its description.
        rows_of: for each file, the digest of its description.
        rows: the rows by digest.
    """
    files: dict[str, list[int]] = {}
    for file, digest in enumerate(rows_of):
        files.setdefault(digest, []).append(file)
    chains = [_chain(rows[digest], members) for digest, members in files.items()]
    graph: dict[_Node, dict[_Node, None]] = {}
    for chain in chains:
        before: list[_Node] = []
        for node in chain:
            graph.setdefault(node, {}).update(dict.fromkeys(before))
            before = [node]
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError:  # the files have the same boxes in different orders: join nothing across files
        chains = [[(index, digest) for index in range(len(rows[digest]))] for digest in files]
        order = [node for chain in chains for node in chain]
    members: dict[_Node, list[StoredRun]] = {node: [] for node in order}
    for chain, (digest, held_by) in zip(chains, files.items(), strict=True):
        progressions = _progressions([(numbers[file], file) for file in held_by])
        for node, row in zip(chain, rows[digest], strict=True):
            members[node] += _runs(row, [(numbers[file], file) for file in held_by], progressions)
    return [run for node in order for run in _joined(members[node])]


def _slot(first: int, numel: int, numbers: list[int]) -> tuple[int, int]:
    """The slot and length that describe a piece; adds a part number if none fits."""
    for slot, number in enumerate(numbers):
        if number == 0 and first == 0:
            return slot, numel
        if number and first and first % number == 0 and numel <= first // number:
            return slot, first // number
    if first % numel == 0 and len(numbers) < _MOST_SLOTS:
        numbers.append(first // numel)
        return len(numbers) - 1, numel
    return -1, first


def _chain(rows: Sequence[Row], members: Sequence[int]) -> list[_Node]:
    """A node for each row of a description: rows of the same box share one. Duplicate boxes are joined to nothing."""
    nodes: list[_Node] = [tuple(map(_hashable, row[:6])) for row in rows]
    if len(set(nodes)) == len(nodes):
        return nodes
    return [(index, members[0]) for index in range(len(nodes))]


def _progressions(members: Sequence[tuple[Sequence[int], int]]) -> list[list[tuple[int, int, int, int]]]:
    """For each slot, sequences of consecutive parts in evenly spaced files: first part, first file, step, count."""
    slots = []
    for slot in range(len(members[0][0])):
        runs: list[tuple[int, int, int, int]] = []
        for number, file in sorted((numbers[slot], file) for numbers, file in members):
            if runs:
                first, first_file, step, count = runs[-1]
                distance = file - (first_file + (count - 1) * step)
                if number == first + count and distance > 0 and (count == 1 or distance == step):
                    runs[-1] = (first, first_file, distance, count + 1)
                    continue
            runs.append((number, file, 1, 1))
        slots.append(runs)
    return slots


def _runs(
    row: Row,
    members: Sequence[tuple[Sequence[int], int]],
    progressions: Sequence[Sequence[tuple[int, int, int, int]]],
) -> list[StoredRun]:
    """The runs described by one row, in all files that have it."""
    dtype, slot, length, numel = row[5:9]
    if slot >= 0 and numel == length:
        return [
            StoredRun(_key(row, number * length, (number + count) * length), dtype, file, step, length)
            for number, file, step, count in progressions[slot]
        ]
    runs = []
    for numbers, file in members:
        first = _first(row, numbers)
        runs.append(StoredRun(_key(row, first, first + numel), dtype, file, 1, numel))
    return runs


def _joined(runs: list[StoredRun]) -> list[StoredRun]:
    """Runs of one box, joined where one continues another."""
    if len(runs) < 2:
        return runs
    runs.sort(key=lambda run: (run.key.first, run.file))
    joined = [runs[0]]
    for run in runs[1:]:
        before = joined[-1]
        step = run.file - (before.file + (before.parts - 1) * before.step)
        continues = (
            run.key.first == before.key.last
            and before.key.numel % before.length == 0
            and step > 0
            and (before.parts == 1 or step == before.step)
            and (run.parts == 1 or (run.step == step and run.length == before.length))
            and run.length <= before.length
        )
        if continues:
            key = _with_range(before.key, before.key.first, run.key.last)
            joined[-1] = StoredRun(key, run.dtype, before.file, step, before.length)
        else:
            joined.append(run)
    return joined


def _first(row: Row, numbers: Sequence[int]) -> int:
    slot, length = row[6:8]
    first: int = length if slot < 0 else numbers[slot] * length
    return first


def _key(row: Row, first: int, last: int) -> PieceKey:
    name, kind, shape, start, stop = row[:5]
    return PieceKey(name, kind, tuple(shape), tuple(start), tuple(stop), first, last)


def _with_range(key: PieceKey, first: int, last: int) -> PieceKey:
    return PieceKey(key.name, key.kind, key.shape, key.start, key.stop, first, last)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
