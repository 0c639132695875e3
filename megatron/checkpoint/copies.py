"""The elements that two pieces of one tensor share, as contiguous copies: box arithmetic without any layout.

Everything here is a pure function of two `PieceKey`s. The work is proportional to contiguous rows, never to elements.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megatron.parallel.pieces import PieceKey

Integers = npt.NDArray[np.int64]


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
        """How many elements are copied in all."""
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
    """The contiguous parts of a piece, in order; only the rows of its flat range are looked at."""
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
