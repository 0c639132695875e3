"""Where the parts of runs lie."""

from __future__ import annotations

import pytest

from megatron.checkpoint.catalogue import Catalogue, StoredRun
from megatron.checkpoint.layout import plan_piece, whole
from megatron.errors import CheckpointError
from megatron.parallel.pieces import PieceKey

RUN = StoredRun(PieceKey("a", "master", (5, 4), (0, 0), (5, 4), 0, 20), "F32", 1, 2, 6)
ONE = StoredRun(whole("b", "weight", (3,)), "BF16", 3, 1, 3)
CATALOGUE = Catalogue([RUN, ONE], lambda file: 100 + file)


def test_parts_are_found_by_number_and_by_range() -> None:
    assert [(RUN.part(number).first, RUN.part(number).last) for number in range(RUN.parts)] == [
        (0, 6), (6, 12), (12, 18), (18, 20),
    ]  # fmt: skip
    assert [list(RUN.parts_within(*bounds)) for bounds in ((0, 1), (5, 7), (18, 99), (20, 30), (7, 7))] == [
        [0], [0, 1], [3], [], [],
    ]  # fmt: skip


def test_parts_end_with_their_file() -> None:
    assert [(CATALOGUE.piece(0, part).file, CATALOGUE.piece(0, part).begin_bytes) for part in range(4)] == [
        (1, 101 - 24), (3, 103 - 24 - 6), (5, 105 - 24), (7, 107 - 8),
    ]  # fmt: skip
    assert [piece.key.name for piece in CATALOGUE.pieces_of(3)] == ["a", "b"]
    assert CATALOGUE.piece(1, 0).end_bytes == 103
    assert not list(CATALOGUE.pieces_of(2))


def test_what_is_stored_of_a_tensor() -> None:
    assert CATALOGUE.names() == ["a", "b"]
    assert CATALOGUE.kinds("a") == ["master"] and CATALOGUE.kinds("c") == []
    assert CATALOGUE.source_kind("a", "weight") == "master" and CATALOGUE.source_kind("a", "exp_avg") is None
    assert CATALOGUE.shape("a") == (5, 4) and CATALOGUE.shape("c") is None
    assert CATALOGUE.dtype("b", "weight") == "BF16"


def test_only_the_parts_that_a_piece_shares_are_planned() -> None:
    wanted = PieceKey("a", "master", (5, 4), (0, 0), (5, 4), 5, 13)
    assert [(piece.file, copies.numel) for piece, copies in plan_piece(wanted, CATALOGUE)] == [(1, 1), (3, 6), (5, 1)]
    rows = PieceKey("a", "master", (5, 4), (3, 1), (4, 3), 0, 2)
    assert [(piece.file, copies.numel) for piece, copies in plan_piece(rows, CATALOGUE)] == [(5, 2)]
    with pytest.raises(CheckpointError, match="tensor c is not in the checkpoint"):
        plan_piece(whole("c", "weight", (3,)), CATALOGUE)
