"""Plans of wanted pieces against plain indexing, and what must be refused."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.checkpoint.catalogue import Catalogue, StoredRun
from megatron.checkpoint.layout import (
    check_complete,
    is_regrouped,
    key_problem,
    plan_piece,
    shared_copies,
    whole,
)
from megatron.errors import CheckpointError
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.fake_pieces import cut_keys, cut_out


def stored(keys: list[PieceKey]) -> Catalogue:
    return Catalogue([StoredRun(key, "F32", 0, 1, key.numel) for key in keys], lambda file: 10**6)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 7), max_size=4), st.integers(0, 2**32))
def test_any_sharding_read_by_any_other_gives_the_tensor(shape: list[int], seed: int) -> None:
    random_cuts = random.Random(seed)
    tensor = torch.arange(int(np.prod(shape)), dtype=torch.float32).reshape(shape)
    saved = cut_keys("a", "weight", tuple(shape), random_cuts)
    check_complete(saved)
    values = {key: cut_out(tensor, key) for key in saved}
    catalogue = stored(saved)
    for key in cut_keys("a", "weight", tuple(shape), random_cuts):
        result = torch.full((key.numel,), float("nan"))
        for piece, copies in plan_piece(key, catalogue):
            assert np.all(np.diff(copies.source) > 0)
            for source, destination, length in zip(copies.source, copies.destination, copies.length, strict=True):
                result[destination : destination + length] = values[piece.key][source : source + length]
        assert torch.equal(result, cut_out(tensor, key))


def test_errors_name_tensor_and_range() -> None:
    key = whole("mlp.weight", "weight", (4, 4))
    top = PieceKey("mlp.weight", "weight", (4, 4), (0, 0), (2, 4), 0, 8)
    with pytest.raises(CheckpointError, match=r"mlp.weight .*elements 8:16 of box \[0:4, 0:4\]"):
        plan_piece(key, stored([top]))
    with pytest.raises(CheckpointError, match=r"elements 0:8 of box"):
        plan_piece(PieceKey("mlp.weight", "weight", (4, 4), (2, 0), (4, 4), 0, 8), stored([top]))
    inner = PieceKey("mlp.weight", "weight", (4, 4), (0, 0), (4, 4), 10, 16)
    with pytest.raises(CheckpointError, match="elements 8:10 of box"):
        plan_piece(key, stored([top, inner]))
    with pytest.raises(CheckpointError, match="element 0 of the requested piece is stored twice"):
        plan_piece(key, stored([top, key]))
    split = whole("mlp.weight", "weight", (2, 2, 4))
    with pytest.raises(CheckpointError, match=r"elements 8:16 of box \[0:2, 0:2, 0:4\] of shape \[2, 2, 4\]"):
        plan_piece(split, stored([top]))
    with pytest.raises(CheckpointError, match=r"has shape \[4, 4\] in the checkpoint.* needs \[8, 4\]"):
        plan_piece(whole("mlp.weight", "weight", (8, 4)), stored([key]))
    with pytest.raises(CheckpointError, match=r"has shape \[4, 4\] in the checkpoint.* needs \[2, 8\]"):
        plan_piece(whole("mlp.weight", "weight", (2, 8)), stored([key]))
    with pytest.raises(CheckpointError, match=r"no exp_avg for tensor mlp.weight \(it has weight\).*--no-load-optim"):
        plan_piece(whole("mlp.weight", "exp_avg", (4, 4)), stored([key]))
    with pytest.raises(CheckpointError, match="tensor other is not in the checkpoint"):
        plan_piece(whole("other", "weight", (4, 4)), stored([key]))


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([((0,), (4,), 0, 4), ((4,), (9,), 0, 4)], r"box \[4:9\]: elements 4:5 are missing"),
        ([((0,), (4,), 0, 4), ((4,), (9,), 0, 3), ((4,), (9,), 2, 5)], r"box \[4:9\]: elements 2:3 are in two pieces"),
        ([((0,), (4,), 0, 4), ((4,), (9,), 2, 5)], r"box \[4:9\]: elements 0:2 are missing"),
        ([((0,), (5,), 0, 5), ((4,), (9,), 0, 5)], r"boxes \[0:5\] and \[4:9\] overlap"),
        ([((0,), (4,), 0, 4)], "wrote 4 of its 9 elements"),
    ],
)
def test_a_save_must_cover_every_element_once(
    pieces: list[tuple[tuple[int, ...], tuple[int, ...], int, int]], text: str
) -> None:
    with pytest.raises(CheckpointError, match=text):
        check_complete(PieceKey("a", "weight", (9,), *piece) for piece in pieces)


def test_many_boxes_are_checked_in_time_proportional_to_their_number() -> None:
    """A tensor cut in its second dimension only: every box begins at the same row."""
    columns = 30_000
    boxes = [PieceKey("a", "weight", (4, columns), (0, at), (4, at + 1), 0, 4) for at in range(columns)]
    began_at = time.process_time()
    check_complete(boxes)
    assert time.process_time() - began_at < 5  # pair by pair it takes minutes
    wide = PieceKey("a", "weight", (4, columns), (0, 20_006), (4, 20_008), 0, 8)
    with pytest.raises(CheckpointError, match=rf"wrote {4 * columns} of its {4 * columns} elements .* or some twice"):
        check_complete([*boxes[:20_005], wide, *boxes[20_007:]])


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(1, 5), max_size=3), st.integers(0, 2**32))
def test_completeness_is_that_of_counting_elements(shape: list[int], seed: int) -> None:
    random_cuts = random.Random(seed)
    keys = cut_keys("a", "weight", tuple(shape), random_cuts)
    change = random_cuts.choice(("none", "lose", "repeat", "grow", "other cut"))
    at = random_cuts.randrange(len(keys))
    if change == "lose":
        del keys[at]
    elif change == "repeat":
        keys.append(keys[at])
    elif change == "grow":
        keys[at] = dataclasses.replace(keys[at], last=keys[at].box_numel)
    elif change == "other cut":
        keys[at:] = cut_keys("a", "weight", tuple(shape), random_cuts)[at:]
    counts = np.zeros(shape, dtype=int)
    for key in keys:
        box = counts[(*(slice(a, b) for a, b in zip(key.start, key.stop, strict=True)), ...)]
        flat = box.reshape(-1).copy()
        flat[key.first : key.last] += 1
        box[...] = flat.reshape(key.box_shape)
    try:
        check_complete(keys)
    except CheckpointError:
        by_box = {(key.start, key.stop): 0 for key in keys}
        for key in keys:
            by_box[key.start, key.stop] += key.numel
        assert (counts != 1).any() or any(
            numel != math.prod(b - a for a, b in zip(*box, strict=True)) for box, numel in by_box.items()
        )
    else:
        assert not keys or (counts == 1).all()


def test_a_tensor_in_more_boxes_than_any_layout_makes_is_refused() -> None:
    shape = (64, 64, 64)
    boxes = [
        PieceKey("a", "weight", shape, (x, y, z), (x + 1, y + 1, z + 2), 0, 2)
        for x in range(64)
        for y in range(64)
        for z in range(0, 64, 2)
    ]
    with pytest.raises(CheckpointError, match="is split into 131072 boxes in 3 dimensions"):
        check_complete(boxes)


def test_pieces_must_agree_on_the_shape() -> None:
    with pytest.raises(CheckpointError, match=r"disagree about its shape: \[4\] and \[5\]"):
        check_complete([whole("a", "weight", (4,)), whole("a", "weight", (5,))])


def test_invalid_ranges_are_reported() -> None:
    assert key_problem(whole("a", "weight", (4, 2))) is None
    assert "different lengths" in str(key_problem(PieceKey("a", "weight", (4,), (0, 0), (4,), 0, 4)))
    assert "is not within shape" in str(key_problem(PieceKey("a", "weight", (4,), (0,), (5,), 0, 5)))
    assert "range 2:6 is not within a box of 4" in str(key_problem(PieceKey("a", "weight", (4,), (0,), (4,), 2, 6)))


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
    catalogue = stored(saved)
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
