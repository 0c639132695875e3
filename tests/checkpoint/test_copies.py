"""The elements that two pieces share, against plain indexing: in one shape, and in shapes that merge dimensions."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.copies import is_regrouped, shared_copies
from megatron.checkpoint.layout import Catalogue, StoredPiece, plan_piece, whole
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.fake_pieces import cut_keys, cut_out


def merged(shape: list[int], random_cuts: random.Random) -> tuple[int, ...]:
    """The shape with random neighbours merged and, now and then, a dimension of size 1 put in."""
    borders = sorted({0, len(shape), *(random_cuts.randint(0, len(shape)) for _ in range(len(shape)))})
    sizes = [math.prod(shape[first:last]) for first, last in itertools.pairwise(borders)]
    if random_cuts.random() < 0.3:
        sizes.insert(random_cuts.randint(0, len(sizes)), 1)
    return tuple(sizes)


@settings(max_examples=400, deadline=None)
@given(st.lists(st.integers(1, 6), max_size=5), st.integers(0, 2**32))
def test_pieces_of_a_regrouped_shape_are_read_by_any_other_sharding(shape: list[int], seed: int) -> None:
    """Both sides merge dimensions of one fine shape at random: N-D read as 2-D, 2-D as N-D, and mixtures."""
    random_cuts = random.Random(seed)
    ours, theirs = merged(shape, random_cuts), merged(shape, random_cuts)
    tensor = torch.arange(math.prod(shape), dtype=torch.float32)
    saved = cut_keys("a", "weight", ours, random_cuts)
    values = {key: cut_out(tensor.reshape(ours), key) for key in saved}
    catalogue = Catalogue.of(StoredPiece(key, "F32", 4, 0, 0) for key in saved)
    if not is_regrouped(ours, theirs):
        return  # both merge across a border of the other, as [6, 4] and [2, 12] do
    for key in cut_keys("a", "weight", theirs, random_cuts):
        result = torch.full((key.numel,), float("nan"))
        for piece, copies in plan_piece(key, catalogue):
            assert np.all(np.diff(copies.source) > 0)
            assert np.all(np.diff(copies.destination) > 0)
            for source, destination, length in zip(copies.source, copies.destination, copies.length, strict=True):
                result[destination : destination + length] = values[piece.key][source : source + length]
        assert torch.equal(result, cut_out(tensor.reshape(theirs), key))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=4), st.integers(0, 2**32))
def test_both_element_numberings_agree_for_equal_shapes(shape: list[int], seed: int) -> None:
    random_cuts = random.Random(seed)
    widened = (1, *shape)  # another shape of the same numbering, which takes the other way
    for stored, wanted in zip(
        cut_keys("a", "weight", tuple(shape), random_cuts),
        cut_keys("a", "weight", tuple(shape), random_cuts),
        strict=False,
    ):
        wide = PieceKey("a", "weight", widened, (0, *stored.start), (1, *stored.stop), stored.first, stored.last)
        direct, counted = shared_copies(stored, wanted), shared_copies(wide, wanted)
        for copies in (direct, counted):
            assert np.all(copies.length > 0)
        elements = [
            {
                (int(source) + step, int(destination) + step)
                for source, destination, length in zip(copies.source, copies.destination, copies.length, strict=True)
                for step in range(int(length))
            }
            for copies in (direct, counted)
        ]
        assert elements[0] == elements[1]


@pytest.mark.parametrize(
    ("shape", "other", "answer"),
    [
        ((24, 16), (2, 3, 4, 16), True),
        ((2, 3, 4, 16), (24, 16), True),
        ((6, 4, 5), (2, 3, 20), True),
        ((6, 4), (4, 6), False),
        ((6, 4), (2, 12), False),
        ((6, 4), (6, 5), False),
        ((6, 4), (24,), True),
        ((1, 6, 1), (6,), True),
        ((), (1, 1), True),
        ((), (2,), False),
        ((4, 9), (2, 2, 3, 3), True),
        ((12, 3), (4, 9), False),
    ],
)
def test_shapes_with_the_same_element_numbering(shape: tuple[int, ...], other: tuple[int, ...], answer: bool) -> None:
    assert is_regrouped(shape, other) is answer
    assert is_regrouped(other, shape) is answer


def test_work_is_proportional_to_shared_rows_not_to_elements() -> None:
    shape = (4096, 65536)
    column = PieceKey("a", "weight", shape, (0, 8192), (4096, 16384), 0, 4096 * 8192)
    assert shared_copies(whole("a", "weight", shape), column).length.size == 4096
    rows = PieceKey("a", "weight", shape, (1024, 0), (2048, 65536), 0, 1024 * 65536)
    assert shared_copies(whole("a", "weight", shape), rows).length.size == 1
    heads = whole("a", "weight", (64, 64, 65536))
    assert shared_copies(column, heads).length.size == 4096
    assert shared_copies(rows, heads).length.size == 1
    few = PieceKey("a", "weight", shape, (0, 0), shape, 5 * 65536, 7 * 65536)
    assert shared_copies(few, column).length.size == 2
    assert shared_copies(few, heads).length.size == 1


def test_disjoint_pieces_share_no_elements() -> None:
    left = PieceKey("a", "weight", (4, 4), (0, 0), (4, 2), 0, 8)
    right = PieceKey("a", "weight", (4, 4), (0, 2), (4, 4), 0, 8)
    assert shared_copies(left, right).numel == 0
