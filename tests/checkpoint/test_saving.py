"""A save that is refused leaves nothing, and messages of a rank stay small."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.checkpoint import load_newest, newest_record, save, saving
from megatron.checkpoint.manifests.contents import StoredFile
from megatron.errors import CheckpointError
from megatron.parallel.joining import open_mesh
from megatron.parallel.pieces import PieceKey
from tests.checkpoint.made.saved_state import MESH
from tests.helpers.layouts import Layout
from tests.helpers.machines.message_sizes import MessageSizes, count_messages
from tests.helpers.ranks import run_ranks

PIECES = [
    (PieceKey("a", "weight", (8,), (0,), (8,), first, first + 4), torch.arange(4, dtype=torch.float32))
    for first in (0, 4)
]


@pytest.mark.parametrize(
    ("pieces", "record", "step", "text"),
    [
        ([((4,), (0,), (4,), 0, 3)], {}, 1, "elements 3:4 are missing"),
        ([((4,), (0,), (5,), 0, 5)], {}, 1, "cannot save a piece of tensor a .*is not within shape"),
        ([((4,), (0,), (4,), 0, 4)] * 2, {}, 1, "is duplicated on one rank"),
        ([], {}, 1, "no rank has anything to save"),
        ([((4,), (0,), (4,), 0, 4)], {"x": float("nan")}, 1, "record .* is not JSON: Out of range"),
        ([((4,), (0,), (4,), 0, 4)], {"x": torch}, 1, "record .* is not JSON"),
        ([((4,), (0,), (4,), 0, 4)], {}, -1, "of step -1"),
    ],
)
def test_an_invalid_save_is_rejected_and_leaves_nothing(
    tmp_path: Path, pieces: list[tuple], record: dict, step: int, text: str
) -> None:
    given_pieces = [(key := PieceKey("a", "weight", *piece), torch.zeros(key.numel)) for piece in pieces]
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path, step, given_pieces, record, MESH)
    assert not list(tmp_path.iterdir())


def count_a_save(rank: int, directory: str) -> tuple[MessageSizes, MessageSizes, MessageSizes]:
    """Saves and loads a tensor of which every rank holds an equal part; counts the messages of each half."""
    mesh = open_mesh(Layout())
    rows = 4000 // mesh.world.size
    key = PieceKey("weight", "weight", (4000,), (rank * rows,), ((rank + 1) * rows,), 0, rows)
    record = {"config": "x" * 1000}
    with count_messages() as saved:
        save(Path(directory), 1000, [(key, torch.zeros(rows))], record, mesh)
    with count_messages() as found:
        newest = newest_record(Path(directory), mesh)
    with count_messages() as loaded:
        assert load_newest(Path(directory), lambda: [(key, lambda _: None)], mesh, known=newest) is not None
    return saved, found, loaded


def test_the_messages_of_a_rank_do_not_grow_with_the_world_except_on_the_first(tmp_path: Path) -> None:
    two = run_ranks(count_a_save, 2, str(tmp_path / "2"))
    four = run_ranks(count_a_save, 4, str(tmp_path / "4"))
    for of_two, *of_four in zip(two[1], *four[1:], strict=True):
        for sizes in of_four:
            assert sizes.total_bytes == of_two.total_bytes
            assert [name for name, _ in sizes.calls] == [name for name, _ in of_two.calls]
    saved, found, loaded = four[3]
    assert saved.received_bytes == 0  # rows are only sent to the first rank
    assert saved.total_bytes < 800
    assert found.total_bytes < 1300  # the record
    assert loaded.total_bytes < 700
    (first_of_two, *_), (first_of_four, *_) = two[0], four[0]
    assert 1.9 < first_of_four.received_bytes / first_of_two.received_bytes < 2.1


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (
            lambda step, run, record, chunk_bytes, files, runs: (files, runs[:-1]),
            "cannot be read back: .* is incomplete",
        ),
        (lambda step, run, record, chunk_bytes, files, runs: ([renamed(files[0])], runs), "its files differ from"),
        (
            lambda step, run, record, chunk_bytes, files, runs: (files, runs[::-1]),
            "its pieces in pieces_00000.safetensors differ from those written",
        ),
    ],
)
def test_a_manifest_that_says_otherwise_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[..., Any], text: str
) -> None:
    right = saving.manifest_texts

    def wrong(*arguments: Any) -> Any:
        return right(*arguments[:4], *change(*arguments))

    save(tmp_path, 1, PIECES, {}, MESH)
    monkeypatch.setattr(saving, "manifest_texts", wrong)
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path, 2, PIECES, {}, MESH)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def renamed(file: StoredFile) -> StoredFile:
    return dataclasses.replace(file, name="pieces_00009.safetensors")
