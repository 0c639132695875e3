"""Descriptions of ranks become runs: the same pieces in the same files and order, in few rows."""

from __future__ import annotations

import json

import pytest

from megatron.checkpoint.catalogue import Catalogue, StoredPiece, StoredRun
from megatron.checkpoint.layout import check_complete
from megatron.checkpoint.manifests.compaction import FileDescription, compact, describe
from megatron.parallel.pieces import Kind, PieceKey
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state
from tests.checkpoint.made.many_ranks import Network


def described(keys: list[PieceKey]) -> FileDescription:
    return describe(StoredPiece(key, "F32", 4, 0, 0) for key in keys)


def compacted(files: list[list[PieceKey]]) -> list[StoredRun]:
    descriptions = [described(keys) for keys in files]
    rows = {description.digest: json.loads(json.dumps(description.rows)) for description in descriptions}
    return compact(
        [description.numbers for description in descriptions],
        [description.digest for description in descriptions],
        rows,
    )


def check_same(files: list[list[PieceKey]], runs: list[StoredRun]) -> None:
    catalogue = Catalogue(runs, lambda file: 10**9)
    for number, keys in enumerate(files):
        pieces = list(catalogue.pieces_of(number))
        assert [piece.key for piece in pieces] == keys
        begins = [piece.begin_bytes for piece in pieces]
        assert begins[1:] == [piece.end_bytes for piece in pieces[:-1]]
        assert pieces[-1].end_bytes == 10**9


@pytest.mark.parametrize("seed", range(30))
def test_any_pieces_keep_their_files_and_order(seed: int) -> None:
    dealt = cut_for_ranks(make_state(), 1 + seed % 5, seed)
    files = [keys for pieces in dealt if (keys := [key for key, _ in pieces])]
    runs = compacted(files)
    check_same(files, runs)
    check_complete(run.key for run in runs)


def test_a_description_names_no_rank() -> None:
    network = Network(8, 1, 16)
    one, other = described(list(network.keys(2))), described(list(network.keys(3)))
    assert one.digest == other.digest
    assert (one.numbers, other.numbers) == ((2,), (3,))
    assert other.keys() == list(network.keys(3))


@pytest.mark.parametrize("ranks", [2, 7, 24, 64])
def test_parameters_split_evenly_take_one_row_each(ranks: int) -> None:
    """Biases of 24 elements end before the last of 64 ranks, and 7 ranks leave a shorter part at every end."""
    network = Network(ranks, 2, 24)
    files = [list(network.keys(rank)) for rank in range(ranks)]
    runs = compacted(files)
    assert len(runs) == 3 * len(network.shapes())
    check_same(files, runs)
    again = compact(*network.descriptions())
    assert sorted(again, key=str) == sorted(runs, key=str)


def test_tensor_parallel_ranks_are_joined_over_steps_of_files() -> None:
    """Rank r of 8 holds half r % 2 of a matrix, split over four data-parallel ranks; experts go by another number."""
    files = []
    for rank in range(8):
        half, part = rank % 2, rank // 2
        start, stop = (half * 4, 0), (half * 4 + 4, 10)
        expert = PieceKey(
            "expert", "weight", (2, 16), (rank // 4, 0), (rank // 4 + 1, 16), rank % 4 * 4, rank % 4 * 4 + 4
        )
        files.append([PieceKey("a", "weight", (8, 10), start, stop, part * 10, part * 10 + 10), expert])
    runs = compacted(files)
    assert [(run.file, run.step, run.parts) for run in runs if run.key.name == "a"] == [(0, 2, 4), (1, 2, 4)]
    assert [(run.file, run.step, run.parts) for run in runs if run.key.name == "expert"] == [(0, 1, 4), (4, 1, 4)]
    check_same(files, runs)


def test_boxes_in_different_orders_are_not_joined() -> None:
    def key(name: str, first: int) -> PieceKey:
        kind: Kind = "weight"
        return PieceKey(name, kind, (8,), (0,), (8,), first, first + 4)

    files = [[key("a", 0), key("b", 0)], [key("b", 4), key("a", 4)]]
    runs = compacted(files)
    assert len(runs) == 4
    check_same(files, runs)
