"""Which stored pieces make up a wanted piece, and whether pieces make up whole tensors; no layout is known here.

The elements that two pieces of one tensor share are found by box arithmetic, as contiguous copies: the work is
proportional to contiguous rows, never to elements.
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

Box = tuple[tuple[int, ...], tuple[int, ...]]
"""Start and stop of a box."""
Integers = npt.NDArray[np.int64]
_MOST_CORNERS = 2**16  # of the boxes of one tensor; the largest layouts have some thousands
_MOST_PAIRS = 10_000


def plan_piece(wanted: PieceKey, catalogue: Catalogue) -> list[tuple[StoredPiece, Copies]]:
    """Where every element of a wanted piece is read.

    The stored shape may differ from the wanted one by merged dimensions, as in checkpoints of earlier programs.

    Raises:
        CheckpointError: the tensor is not stored, has another shape, or some element is not stored, or stored twice.
    """
    kind = catalogue.served_kind(wanted.name, wanted.kind)
    shape = catalogue.shape(wanted.name)
    if shape is not None and not is_regrouped(shape, wanted.shape):
        raise CheckpointError(
            f"tensor {wanted.name} has shape {list(shape)} in the checkpoint, but this run's model needs "
            f"{list(wanted.shape)}. The model flags must be those the checkpoint was made with."
        )
    if kind is None:
        raise CheckpointError(_absent(wanted, catalogue))
    sources: list[tuple[StoredPiece, Copies]] = []
    for number, run in catalogue.stored(wanted.name, kind):
        for part in run.parts_within(*_shared_range(run.key, wanted)):
            copies = shared_copies(run.part(part), wanted)
            if copies.length.size:
                sources.append((catalogue.piece(number, part), copies))
    _check_covered(wanted, sources)
    return sources


def check_complete(keys: Iterable[PieceKey]) -> None:
    """Checks that pieces make up whole tensors: every element of every (name, kind) in exactly one piece.

    The boxes of a tensor must be disjoint and fill it, and flat ranges must fill each box.

    Raises:
        CheckpointError: elements are missing or written twice, or pieces disagree about a tensor's shape.
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
    """The piece that is a whole tensor."""
    return PieceKey(name, kind, shape, (0,) * len(shape), shape, 0, math.prod(shape))


def key_problem(key: PieceKey) -> str | None:
    """What is wrong with the numbers of a piece, or None: the box must lie in the tensor, the range in the box."""
    if not len(key.shape) == len(key.start) == len(key.stop):
        return "shape, start and stop have different lengths"
    for size, start, stop in zip(key.shape, key.start, key.stop, strict=True):
        if not 0 <= start < stop <= size:
            return f"box {_box_text(key.start, key.stop)} does not lie in shape {list(key.shape)}"
    if not 0 <= key.first < key.last <= key.box_numel:
        return f"range {key.first}:{key.last} does not lie in a box of {key.box_numel} elements"
    return None


def as_kind(text: object) -> Kind | None:
    """The text as a kind, or None if it is not one."""
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


def shared_copies(stored: PieceKey, wanted: PieceKey) -> Copies:
    """The elements that two pieces of one tensor share.

    The pieces may describe the tensor by different shapes if one merges dimensions of the other (`is_regrouped`).
    """
    if stored.shape == wanted.shape:
        return _same_shape_copies(stored, wanted)
    return _regrouped_copies(stored, wanted)


def is_regrouped(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether two shapes differ at most by merged neighbouring dimensions, so that both number elements alike.

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


def _shared_range(stored: PieceKey, wanted: PieceKey) -> tuple[int, int]:
    """A flat range of a stored box outside of which no wanted element lies."""
    if stored.shape != wanted.shape:
        return stored.first, stored.last
    if (stored.start, stored.stop) == (wanted.start, wanted.stop):
        return wanted.first, wanted.last
    low = [max(a, b) - a for a, b in zip(stored.start, wanted.start, strict=True)]
    high = [min(a, b) - c for a, b, c in zip(stored.stop, wanted.stop, stored.start, strict=True)]
    if any(a >= b for a, b in zip(low, high, strict=True)):
        return 0, 0
    first = last = 0
    for size, a, b in zip(stored.box_shape, low, high, strict=True):
        first, last = first * size + a, last * size + b - 1
    return first, last + 1


def _absent(wanted: PieceKey, catalogue: Catalogue) -> str:
    stored = sorted(catalogue.kinds(wanted.name))
    if stored:
        return (
            f"the checkpoint holds no {wanted.kind} of tensor {wanted.name} (it holds {', '.join(stored)}). "
            "If it was saved without the optimizer, load it with --no-load-optim or --finetune."
        )
    return (
        f"tensor {wanted.name} is not in the checkpoint, which holds {len(catalogue.names())} tensors. "
        "The model flags must be those the checkpoint was made with."
    )


def _check_covered(wanted: PieceKey, sources: list[tuple[StoredPiece, Copies]]) -> None:
    if not sources:
        raise CheckpointError(_gap_text(wanted, 0, wanted.numel))
    start = np.concatenate([copies.destination for _, copies in sources])
    length = np.concatenate([copies.length for _, copies in sources])
    order = np.argsort(start, kind="stable")
    start, end = start[order], (start + length)[order]
    expected = np.concatenate([[0], end[:-1]])
    wrong = np.flatnonzero(start != expected)
    if wrong.size:
        at = int(wrong[0])
        if start[at] > expected[at]:
            raise CheckpointError(_gap_text(wanted, int(expected[at]), int(start[at])))
        raise CheckpointError(
            f"tensor {wanted.name} ({wanted.kind}): element {int(start[at])} of the wanted piece is stored twice. "
            "The checkpoint was written wrongly; use another one."
        )
    if end[-1] != wanted.numel:
        raise CheckpointError(_gap_text(wanted, int(end[-1]), wanted.numel))


def _gap_text(wanted: PieceKey, first: int, last: int) -> str:
    return (
        f"tensor {wanted.name} ({wanted.kind}): elements {wanted.first + first}:{wanted.first + last} of box "
        f"{_box_text(wanted.start, wanted.stop)} of shape {list(wanted.shape)} are not in the checkpoint. "
        "It was saved incompletely; use another one."
    )


def _check_tiled(what: str, members: list[PieceKey]) -> None:
    reached = 0
    for key in sorted(members, key=lambda key: key.first):
        if key.first != reached:
            problem = "are in no piece" if key.first > reached else "are in two pieces"
            low, high = sorted((key.first, reached))
            raise CheckpointError(f"{what}: elements {low}:{high} {problem}. The ranks must write each exactly once.")
        reached = key.last
    if reached != members[0].box_numel:
        raise CheckpointError(
            f"{what}: elements {reached}:{members[0].box_numel} are in no piece. "
            "The ranks must write each exactly once."
        )


def _check_boxes(name: str, kind: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """Checks that boxes fill a tensor without overlap, in time proportional to their number.

    A set of boxes covers exactly what another one does if the signed corners of both cancel: the indicator of a box is
    the running sum, in every dimension, of +1 and -1 at its 2^d corners.
    """
    if len(boxes) == 1 and boxes[0] == ((0,) * len(shape), shape):
        return
    cut = [at for at, size in enumerate(shape) if any(start[at] or stop[at] != size for start, stop in boxes)]
    if len(boxes) << len(cut) > _MOST_CORNERS:
        raise CheckpointError(
            f"tensor {name} ({kind}) is cut into {len(boxes)} boxes in {len(cut)} dimensions, which no layout does. "
            "Each element must be written exactly once."
        )
    corners: dict[tuple[int, ...], int] = {}
    for sign, (start, stop) in [(-1, ((0,) * len(shape), shape)), *((1, box) for box in boxes)]:
        points: list[tuple[tuple[int, ...], int]] = [((), sign)]
        for at in cut:
            points = [
                ((*point, place), weight * side)
                for point, weight in points
                for place, side in ((start[at], 1), (stop[at], -1))
            ]
        for point, weight in points:
            corners[point] = corners.get(point, 0) + weight
    if any(corners.values()):
        raise CheckpointError(f"tensor {name} ({kind}): {_box_problem(shape, boxes)}")


def _box_problem(shape: tuple[int, ...], boxes: list[Box]) -> str:
    """Why sorted boxes do not tile a tensor; not every pair is examined."""
    looked_at = volume = 0
    for number, (start, stop) in enumerate(boxes):
        volume += math.prod(b - a for a, b in zip(start, stop, strict=True))
        for other_start, other_stop in boxes[number + 1 :]:
            looked_at += 1
            if looked_at > _MOST_PAIRS or (start and other_start[0] >= stop[0]):
                break  # sorted by the first coordinate: no later box can meet this one
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


def _same_shape_copies(stored: PieceKey, wanted: PieceKey) -> Copies:
    """Copies between pieces of one shape: the work is proportional to the rows that they share."""
    dimensions = len(stored.shape)
    low = [max(a, b) for a, b in zip(stored.start, wanted.start, strict=True)]
    high = [min(a, b) for a, b in zip(stored.stop, wanted.stop, strict=True)]
    if dimensions:  # flat ranges bound the first dimension: a slice of a big box must not cost all its rows
        for key in (stored, wanted):
            row = max(1, math.prod(key.box_shape[1:]))
            low[0] = max(low[0], key.start[0] + key.first // row)
            high[0] = min(high[0], key.start[0] - (-key.last // row))
    sides = [b - a for a, b in zip(low, high, strict=True)]
    if min(sides, default=1) <= 0:
        return _nothing()
    inner = dimensions  # dimensions >= inner are whole in both boxes, so a copy goes through them
    while inner > 0 and sides[inner - 1] == stored.box_shape[inner - 1] == wanted.box_shape[inner - 1]:
        inner -= 1
    outer = max(0, inner - 1)  # the innermost dimension that is not whole is still contiguous
    length = math.prod(sides[outer:])
    source = _offsets(stored, low, sides, outer)
    destination = _offsets(wanted, low, sides, outer)
    skip = np.maximum(0, np.maximum(stored.first - source, wanted.first - destination))
    until = np.minimum(length, np.minimum(stored.last - source, wanted.last - destination))
    kept = until > skip
    source, destination, skip, until = source[kept], destination[kept], skip[kept], until[kept]
    return Copies(source + skip - stored.first, destination + skip - wanted.first, until - skip)


def _regrouped_copies(stored: PieceKey, wanted: PieceKey) -> Copies:
    """Copies between pieces of different shapes, found by the elements' numbers in the whole tensor."""
    ours, theirs = _stretches(stored), _stretches(wanted)
    first = np.searchsorted(theirs.last, ours.first, side="right")
    counts = np.maximum(0, np.searchsorted(theirs.first, ours.last, side="left") - first)
    source = np.repeat(np.arange(counts.size), counts)
    within = np.arange(source.size) - np.repeat(np.cumsum(counts) - counts, counts)
    destination = first[source] + within
    begin = np.maximum(ours.first[source], theirs.first[destination])
    end = np.minimum(ours.last[source], theirs.last[destination])
    return Copies(
        ours.offset[source] + begin - ours.first[source],
        theirs.offset[destination] + begin - theirs.first[destination],
        end - begin,
    )


@dataclass(frozen=True)
class _Stretches:
    """The contiguous parts of a piece: element numbers in the whole tensor, and where each part begins in the piece."""

    first: Integers
    last: Integers
    offset: Integers


def _stretches(key: PieceKey) -> _Stretches:
    """The contiguous parts of a piece, in order; only the rows of its flat range are examined."""
    box = key.box_shape
    outer = len(box)
    while outer > 0 and box[outer - 1] == key.shape[outer - 1]:
        outer -= 1
    outer = max(0, outer - 1)  # the innermost dimension that is not whole is still contiguous
    length = math.prod(box[outer:])
    rows = np.arange(key.first // length, -(-key.last // length), dtype=np.int64)
    strides = [math.prod(key.shape[dimension + 1 :]) for dimension in range(len(box))]
    first = np.full(rows.shape, sum(start * stride for start, stride in zip(key.start, strides, strict=True)))
    for index, stride in zip(np.unravel_index(rows, box[:outer]) if outer else (), strides, strict=False):
        first += index * stride
    offset = rows * length - key.first
    skipped = np.maximum(0, -offset)
    last = first + np.minimum(length, key.numel - offset)
    return _Stretches(first + skipped, last, offset + skipped)


def _offsets(key: PieceKey, low: Sequence[int], sides: Sequence[int], outer: int) -> Integers:
    """Row-major numbers, in `key`'s box, of the first elements of all runs."""
    box = key.box_shape
    strides = [math.prod(box[dimension + 1 :]) for dimension in range(len(box))]
    base = sum((place - start) * stride for place, start, stride in zip(low, key.start, strides, strict=True))
    offsets = np.array([base], dtype=np.int64)
    for dimension in range(outer):
        steps = np.arange(sides[dimension], dtype=np.int64) * strides[dimension]
        offsets = (offsets[:, None] + steps).ravel()
    return offsets


def _nothing() -> Copies:
    empty = np.empty(0, dtype=np.int64)
    return Copies(empty, empty, empty)
