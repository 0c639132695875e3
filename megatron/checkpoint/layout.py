"""Assembles target pieces from stored pieces, and checks that pieces cover whole tensors, independent of any layout.

Box arithmetic finds the elements that two pieces of a tensor share, as contiguous copies: the work is proportional to
contiguous rows, never to elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.checkpoint.catalogue import KINDS, Catalogue, StoredPiece
from megatron.errors import CheckpointError
from megatron.parallel.pieces import Kind, PieceKey

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start, stop
Integers = npt.NDArray[np.int64]
_MOST_CORNERS = 2**16  # of the boxes of one tensor; the largest layouts have some thousands
_MOST_PAIRS = 10_000


def plan_piece(target: PieceKey, catalogue: Catalogue) -> list[tuple[StoredPiece, Copies]]:
    """The stored pieces to read for a target piece, with the copies from each.

    The stored shape may differ from the target's by merged dimensions, as in checkpoints of earlier versions.

    Raises:
        CheckpointError: the tensor is missing, has another shape, or an element is missing or stored twice.
    """
    kind = catalogue.source_kind(target.name, target.kind)
    shape = catalogue.shape(target.name)
    if shape is not None and not is_regrouped(shape, target.shape):
        raise CheckpointError(
            f"tensor {target.name} has shape {list(shape)} in the checkpoint, but this run's model needs "
            f"{list(target.shape)}. Use the model flags that the checkpoint was saved with."
        )
    if kind is None:
        raise CheckpointError(_absent(target, catalogue))
    sources: list[tuple[StoredPiece, Copies]] = []
    for number, run in catalogue.stored(target.name, kind):
        for part in run.parts_within(*_shared_range(run.key, target)):
            copies = shared_copies(run.part(part), target)
            if copies.length.size:
                sources.append((catalogue.piece(number, part), copies))
    _check_covered(target, sources)
    return sources


def check_complete(keys: Iterable[PieceKey]) -> None:
    """Checks that pieces cover whole tensors: every element of every (name, kind) in exactly one piece.

    The boxes of a tensor must be disjoint and fill it, and flat ranges must fill each box.

    Raises:
        CheckpointError: elements are missing or duplicated, or pieces disagree about a tensor's shape.
    """
    tensors: dict[tuple[str, Kind], dict[Box, list[PieceKey]]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for key in keys:
        if shapes.setdefault(key.name, key.shape) != key.shape:
            raise CheckpointError(
                f"pieces of tensor {key.name} disagree about its shape: {list(shapes[key.name])} and "
                f"{list(key.shape)}. All ranks must describe the same global tensor."
            )
        tensors.setdefault((key.name, key.kind), {}).setdefault((key.start, key.stop), []).append(key)
    for (name, kind), boxes in tensors.items():
        for (start, stop), members in boxes.items():
            _check_tiled(f"tensor {name} ({kind}), box {_box_text(start, stop)}", members)
        _check_boxes(name, kind, shapes[name], sorted(boxes))


def whole(name: str, kind: Kind, shape: tuple[int, ...]) -> PieceKey:
    """The piece that covers a whole tensor."""
    return PieceKey(name, kind, shape, (0,) * len(shape), shape, 0, math.prod(shape))


def key_problem(key: PieceKey) -> str | None:
    """Describes a box outside the tensor, or a range outside the box; None if the piece is valid."""
    if not len(key.shape) == len(key.start) == len(key.stop):
        return "shape, start and stop have different lengths"
    for size, start, stop in zip(key.shape, key.start, key.stop, strict=True):
        if not 0 <= start < stop <= size:
            return f"box {_box_text(key.start, key.stop)} is not within shape {list(key.shape)}"
    if not 0 <= key.first < key.last <= key.box_numel:
        return f"range {key.first}:{key.last} is not within a box of {key.box_numel} elements"
    return None


def as_kind(text: object) -> Kind | None:
    """Parses a kind; None if the text is not one."""
    return next((kind for kind in KINDS if kind == text), None)


@dataclass(frozen=True)
class Copies:
    """Contiguous copies from one piece to another, in the order of both.

    Offsets and lengths count elements, from the start of each piece.
    """

    source: Integers
    destination: Integers
    length: Integers

    @property
    def numel(self) -> int:
        return int(self.length.sum())


def shared_copies(stored: PieceKey, target: PieceKey) -> Copies:
    """The elements that two pieces of one tensor share.

    Their shapes may differ if one merges dimensions of the other (`is_regrouped`).
    """
    if stored.shape == target.shape:
        return _same_shape_copies(stored, target)
    return _regrouped_copies(stored, target)


def is_regrouped(shape: Sequence[int], other: Sequence[int]) -> bool:
    """True if two shapes differ at most by merged adjacent dimensions, so that elements have the same flat index.

    `[24, 16]` and `[2, 3, 4, 16]` do, and so do `[6, 4, 5]` and `[2, 3, 20]`; `[6, 4]` and `[4, 6]` do not. Dimensions
    of size 1 do not matter.
    """
    left, right = ([size for size in sizes if size != 1] for sizes in (shape, other))
    if math.prod(left) != math.prod(right):
        return False
    while left and right:
        fine, coarse = (left, right) if left[0] <= right[0] else (right, left)
        merged = 1
        while merged < coarse[0]:
            merged *= fine.pop(0)
        if merged != coarse.pop(0):
            return False
    return True


def _shared_range(stored: PieceKey, target: PieceKey) -> tuple[int, int]:
    """A flat range of the stored box that contains all elements it shares with the target."""
    if stored.shape != target.shape:
        return stored.first, stored.last
    if (stored.start, stored.stop) == (target.start, target.stop):
        return target.first, target.last
    low = [max(a, b) - a for a, b in zip(stored.start, target.start, strict=True)]
    high = [min(a, b) - c for a, b, c in zip(stored.stop, target.stop, stored.start, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return 0, 0
    first = last = 0
    for size, a, b in zip(stored.box_shape, low, high, strict=True):
        first, last = first * size + a, last * size + b - 1
    return first, last + 1


def _absent(target: PieceKey, catalogue: Catalogue) -> str:
    stored = sorted(catalogue.kinds(target.name))
    if stored:
        return (
            f"the checkpoint has no {target.kind} for tensor {target.name} (it has {', '.join(stored)}). "
            "If it was saved without the optimizer, load it with --no-load-optim or --finetune."
        )
    return (
        f"tensor {target.name} is not in the checkpoint, which has {len(catalogue.names())} tensors. "
        "Use the model flags that the checkpoint was saved with."
    )


def _check_covered(target: PieceKey, sources: list[tuple[StoredPiece, Copies]]) -> None:
    if not sources:
        raise CheckpointError(_gap_text(target, 0, target.numel))
    start = np.concatenate([copies.destination for _, copies in sources])
    length = np.concatenate([copies.length for _, copies in sources])
    order = np.argsort(start, kind="stable")
    start, end = start[order], (start + length)[order]
    expected = np.concatenate([[0], end[:-1]])
    wrong = np.flatnonzero(start != expected)
    if wrong.size:
        index = int(wrong[0])
        if start[index] > expected[index]:
            raise CheckpointError(_gap_text(target, int(expected[index]), int(start[index])))
        raise CheckpointError(
            f"tensor {target.name} ({target.kind}): element {int(start[index])} of the requested piece is stored twice."
            " The checkpoint is invalid; use another one."
        )
    if end[-1] != target.numel:
        raise CheckpointError(_gap_text(target, int(end[-1]), target.numel))


def _gap_text(target: PieceKey, first: int, last: int) -> str:
    return (
        f"tensor {target.name} ({target.kind}): elements {target.first + first}:{target.first + last} of box "
        f"{_box_text(target.start, target.stop)} of shape {list(target.shape)} are not in the checkpoint. "
        "It is incomplete; use another one."
    )


def _check_tiled(what: str, members: list[PieceKey]) -> None:
    reached = 0
    for key in sorted(members, key=lambda key: key.first):
        if key.first != reached:
            problem = "are missing" if key.first > reached else "are in two pieces"
            low, high = sorted((key.first, reached))
            raise CheckpointError(f"{what}: elements {low}:{high} {problem}. The ranks must write each exactly once.")
        reached = key.last
    if reached != members[0].box_numel:
        raise CheckpointError(
            f"{what}: elements {reached}:{members[0].box_numel} are missing. The ranks must write each exactly once."
        )


def _check_boxes(name: str, kind: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Checks that boxes fill a tensor without overlap, in time linear in their number.

    Two sets of boxes cover the same elements if their signed corners cancel: the indicator of a box is the running sum,
    in every dimension, of +1 and -1 at its 2^d corners.
    """
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return
    split = [axis for axis, size in enumerate(shape) if any(start[axis] or stop[axis] != size for start, stop in boxes)]
    if len(boxes) << len(split) > _MOST_CORNERS:
        raise CheckpointError(
            f"tensor {name} ({kind}) is split into {len(boxes)} boxes in {len(split)} dimensions, more than any layout "
            "needs. Each element must be written exactly once."
        )
    corners: dict[tuple[int, ...], int] = {}
    for sign, (start, stop) in [(-1, ((0,) * len(shape), shape)), *((1, box) for box in boxes)]:
        points: list[tuple[tuple[int, ...], int]] = [((), sign)]
        for axis in split:
            points = [
                ((*point, coordinate), weight * side)
                for point, weight in points
                for coordinate, side in ((start[axis], 1), (stop[axis], -1))
            ]
        for point, weight in points:
            corners[point] = corners.get(point, 0) + weight
    if any(corners.values()):
        raise CheckpointError(f"tensor {name} ({kind}): {_box_problem(shape, boxes)}")


def _box_problem(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """The reason why sorted boxes do not tile a tensor; examines a bounded number of pairs."""
    pairs = volume = 0
    for number, (start, stop) in enumerate(boxes):
        volume += math.prod(b - a for a, b in zip(start, stop, strict=True))
        for other_start, other_stop in boxes[number + 1 :]:
            pairs += 1
            if pairs > _MOST_PAIRS or (start and other_start[0] >= stop[0]):
                break  # sorted by the first coordinate: no later box can overlap this one
            if all(max(a, c) < min(b, d) for a, b, c, d in zip(start, stop, other_start, other_stop, strict=True)):
                return (
                    f"boxes {_box_text(start, stop)} and {_box_text(other_start, other_stop)} overlap. The ranks must "
                    "write each element exactly once."
                )
    return (
        f"the ranks wrote {volume} of its {math.prod(shape)} elements (shape {list(shape)}), or some twice. Each must "
        "be written exactly once."
    )


def _box_text(start: tuple[int, ...], stop: tuple[int, ...]) -> str:
    return "[" + ", ".join(f"{a}:{b}" for a, b in zip(start, stop, strict=True)) + "]"


def _same_shape_copies(stored: PieceKey, target: PieceKey) -> Copies:
    """Copies between pieces of equal shape; the work is proportional to the rows that they share."""
    dimensions = len(stored.shape)
    low = [max(a, b) for a, b in zip(stored.start, target.start, strict=True)]
    high = [min(a, b) for a, b in zip(stored.stop, target.stop, strict=True)]
    if dimensions:  # flat ranges bound the first dimension: a slice of a big box must not visit all its rows
        for key in (stored, target):
            row = max(1, math.prod(key.box_shape[1:]))
            low[0] = max(low[0], key.start[0] + key.first // row)
            high[0] = min(high[0], key.start[0] - (-key.last // row))
    sides = [b - a for a, b in zip(low, high, strict=True)]
    if min(sides, default=1) <= 0:
        return _nothing()
    inner = dimensions  # dimensions >= inner are complete in both boxes, so that copies are contiguous over them
    while inner > 0 and sides[inner - 1] == stored.box_shape[inner - 1] == target.box_shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)  # the innermost incomplete dimension is still contiguous
    length = math.prod(sides[outer:])
    source = _offsets(stored, low, sides, outer)
    destination = _offsets(target, low, sides, outer)
    skip = np.maximum(0, np.maximum(stored.first - source, target.first - destination))
    until = np.minimum(length, np.minimum(stored.last - source, target.last - destination))
    kept = until > skip
    source, destination, skip, until = source[kept], destination[kept], skip[kept], until[kept]
    return Copies(source + skip - stored.first, destination + skip - target.first, until - skip)


def _regrouped_copies(stored: PieceKey, target: PieceKey) -> Copies:
    """Copies between pieces of different shapes, by the flat indices of elements in the whole tensor."""
    left, right = _segments(stored), _segments(target)
    first = np.searchsorted(right.last, left.first, side="right")
    counts = np.maximum(0, np.searchsorted(right.first, left.last, side="left") - first)
    source = np.repeat(np.arange(counts.size), counts)
    within = np.arange(source.size) - np.repeat(np.cumsum(counts) - counts, counts)
    destination = first[source] + within
    start = np.maximum(left.first[source], right.first[destination])
    end = np.minimum(left.last[source], right.last[destination])
    return Copies(
        left.offset[source] + start - left.first[source],
        right.offset[destination] + start - right.first[destination],
        end - start,
    )


@dataclass(frozen=True)
class _Segments:
    """The contiguous segments of a piece: flat index range in the whole tensor, and offset in the piece."""

    first: Integers
    last: Integers
    offset: Integers


def _segments(key: PieceKey) -> _Segments:
    """The contiguous segments of a piece, in order; visits only the rows of its flat range."""
    box = key.box_shape
    outer = len(box)
    while outer > 0 and box[outer - 1] == key.shape[outer - 1]:
        outer -= 1
    outer = max(0, outer - 1)  # the innermost incomplete dimension is still contiguous
    length = math.prod(box[outer:])
    rows = np.arange(key.first // length, -(-key.last // length), dtype=np.int64)
    strides = [math.prod(key.shape[dimension + 1 :]) for dimension in range(len(box))]
    first = np.full(rows.shape, sum(start * stride for start, stride in zip(key.start, strides, strict=True)))
    for index, stride in zip(np.unravel_index(rows, box[:outer]) if outer else (), strides, strict=False):
        first += index * stride
    offset = rows * length - key.first
    skipped = np.maximum(0, -offset)
    last = first + np.minimum(length, key.numel - offset)
    return _Segments(first + skipped, last, offset + skipped)


def _offsets(key: PieceKey, low: Sequence[int], sides: Sequence[int], outer: int) -> Integers:
    """Row-major indices, in the box of `key`, of the first elements of all contiguous rows."""
    box = key.box_shape
    strides = [math.prod(box[dimension + 1 :]) for dimension in range(len(box))]
    base = sum((index - start) * stride for index, start, stride in zip(low, key.start, strides, strict=True))
    offsets = np.array([base], dtype=np.int64)
    for dimension in range(outer):
        steps = np.arange(sides[dimension], dtype=np.int64) * strides[dimension]
        offsets = (offsets[:, None] + steps).ravel()
    return offsets


def _nothing() -> Copies:
    empty = np.empty(0, dtype=np.int64)
    return Copies(empty, empty, empty)
