"""Listed checkpoints in every state."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron.checkpoint.storage import Storage
from megatron.errors import StorageError
from tests.checkpoint.retention.checkpoints import RUN, save_step
from trident.checkpoints.listing import entries_in


def test_every_state_is_shown(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4, 5):
        save_step(tmp_path, step, loss=0.5 * step)
    (tmp_path / "iter_0000002" / "manifest.json").write_text("{}")
    (tmp_path / "iter_0000003").rename(tmp_path / ".old-iter_0000003-0a")
    (tmp_path / "iter_0000004").rename(tmp_path / ".trash-iter_0000004-0a")
    (tmp_path / ".tmp-iter_0000006-0a").mkdir()
    (tmp_path / ".tmp-iter_0000006-0a" / "pieces_00000.safetensors").write_bytes(b"x" * 5000)
    (tmp_path / "iter_0000007").symlink_to(tmp_path / "iter_0000001")
    (tmp_path / "iter_0000008").touch()
    for name in ("notes.txt", ".tmp-latest-0a", "iter_3", ".trash-notes"):
        (tmp_path / name).touch()
    entries = entries_in(tmp_path, Storage())
    assert [(entry.step, entry.state, entry.is_leftover) for entry in entries] == [
        (8, "damaged", False),
        (7, "link", False),
        (6, "unfinished", True),
        (5, "complete", False),
        (4, "deleted", True),
        (3, "aside", True),
        (2, "damaged", False),
        (1, "complete", False),
    ]
    whole = entries[3].to_json()
    assert (whole["run_id"], whole["validation_loss"], whole["problem"]) == (RUN, 2.5, None)
    assert whole["size_bytes"] == (tmp_path / "iter_0000005" / "pieces_00000.safetensors").stat().st_size
    assert entries[5].summary is not None and entries[5].problem == ""  # whole: a save put it aside
    assert "manifest.json is damaged: it does not end with its digest" in entries[6].problem
    assert entries[6].to_json()["run_id"] is None
    assert entries[2].size_bytes is not None and entries[2].size_bytes >= 5000
    assert entries[0].size_bytes is None


def test_an_unreadable_checkpoint_is_not_damaged(tmp_path: Path) -> None:
    class Forbidden(Storage):
        def open_to_read(self, path: Path) -> tuple[int, int]:
            raise PermissionError(13, "Permission denied")

    save_step(tmp_path, 1)
    [entry] = entries_in(tmp_path, Forbidden())
    assert entry.state == "unreadable" and "Permission denied (EACCES)" in entry.problem


def test_a_checkpoint_itself_is_its_only_entry(tmp_path: Path) -> None:
    path = save_step(tmp_path, 4).rename(tmp_path / "best")
    [entry] = entries_in(path, Storage())
    assert (entry.path, entry.step, entry.state) == (path, 4, "complete")


def test_a_folder_that_cannot_be_listed_is_an_error(tmp_path: Path) -> None:
    assert entries_in(tmp_path, Storage()) == []
    with pytest.raises(StorageError, match=r"cannot list .*nowhere: No such file or directory. Give a folder of"):
        entries_in(tmp_path / "nowhere", Storage())
