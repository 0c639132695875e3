"""The ranks of a run as a drawing."""

from __future__ import annotations

from megatron.parallel.mesh import ParallelMesh, standard_axes
from megatron.train.start_up.summary import rank_grid


def test_every_rank_of_a_small_run() -> None:
    assert rank_grid(2, 2, 2) == ["stage 0   [0 1] [2 3]", "stage 1   [4 5] [6 7]"]
    assert rank_grid(1, 3, 1) == ["[0] [1] [2]"]


def test_the_ends_of_a_large_run() -> None:
    assert rank_grid(12, 16, 8) == [
        "stage 0   [0-7] [8-15] ... [120-127]",
        "stage 1   [128-135] [136-143] ... [248-255]",
        "  ...",
        "stage 11  [1408-1415] [1416-1423] ... [1528-1535]",
    ]


def test_it_counts_as_the_mesh_does() -> None:
    for rank in range(8):
        mesh = ParallelMesh.at(standard_axes(8, tp=2, pp=2), rank)
        brackets = rank_grid(2, 2, 2)[mesh.pp.rank].split("[")[1:]
        words = brackets[mesh.batch.rank].rstrip("] ").split()
        assert words[mesh.tp.rank] == str(rank)
