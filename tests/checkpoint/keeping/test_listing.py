"""What a folder of checkpoints holds, in every state that it can be in."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from megatron.checkpoint import manifest
from megatron.checkpoint.keeping.listing import ManifestSummaries, entries_in, other_files, steps_in
from megatron.checkpoint.storage import Storage
from megatron.errors import DamagedError, StorageError
from tests.checkpoint.keeping.checkpoints import RUN, save_step
from tests.checkpoint.made.saved_state import save_state


def test_a_manifest_is_parsed_once_and_sizes_are_looked_at_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []
    real = manifest._checked

    def counted(path: Path, *more: Any) -> Any:
        if not path.parent.name.startswith(".tmp"):  # which a save reads back
            parsed.append(path.parent.name)
        return real(path, *more)

    monkeypatch.setattr(manifest, "_checked", counted)
    summaries = ManifestSummaries(Storage())
    first, second = save_step(tmp_path, 1, loss=2.5), save_step(tmp_path, 2)
    one = summaries.of(first)
    assert (one.step, one.run_id, one.validation_loss, dict(one.layout)) == (1, RUN, 2.5, {})
    assert one.size_bytes == (first / "pieces_00000.safetensors").stat().st_size
    assert summaries.of(first) == one and summaries.of(second).step == 2
    assert parsed == ["iter_0000001", "iter_0000002"]
    save_step(tmp_path, 1, seed=9)
    assert summaries.of(first).digest != one.digest
    assert parsed[2:] == ["iter_0000001"]
    with (first / "pieces_00000.safetensors").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DamagedError, match=r"pieces_00000.safetensors has \d+ bytes, but its manifest says \d+. Use"):
        summaries.of(first)
    summaries.of(second)
    (second / "pieces_00000.safetensors").unlink()
    with pytest.raises(DamagedError, match=r"cannot read .*iter_0000002/pieces_00000.safetensors: No such file"):
        summaries.of(second)


def test_missing_rights_are_not_damage(tmp_path: Path) -> None:
    class Forbidden(Storage):
        is_forbidden = False

        def open_to_read(self, path: Path) -> tuple[int, int]:
            if self.is_forbidden and path.name.startswith("pieces"):
                raise PermissionError(13, "Permission denied")
            return super().open_to_read(path)

    storage = Forbidden()
    summaries, folder = ManifestSummaries(storage), save_step(tmp_path, 1)
    summaries.of(folder)
    storage.is_forbidden = True
    with pytest.raises(StorageError, match=r"cannot read .*pieces_00000.safetensors: Permission denied \(EACCES\)"):
        summaries.of(folder)


@pytest.mark.parametrize("value", [None, "1", True, []])
def test_a_loss_that_is_no_number_is_none(tmp_path: Path, value: Any) -> None:
    assert ManifestSummaries(Storage()).of(save_step(tmp_path, 1, loss=value)).validation_loss is None


def test_an_older_record_has_no_run_and_no_layout(tmp_path: Path) -> None:
    summary = ManifestSummaries(Storage()).of(save_state(tmp_path, 3))
    assert (summary.run_id, dict(summary.layout)) == ("", {})


def test_folders_are_listed_newest_first_without_links_and_others(tmp_path: Path) -> None:
    for name in ("iter_0000002", "iter_0000010", "iter_10000001", ".old-iter_0000003-ab", "iter_3", "best"):
        (tmp_path / name).mkdir()
    (tmp_path / "iter_0000004").symlink_to(tmp_path / "iter_0000002")
    (tmp_path / "iter_0000005").touch()
    os.mkfifo(tmp_path / "iter_0000006")
    assert list(steps_in(tmp_path, Storage())) == [10000001, 10, 2]


def test_files_of_others_are_named(tmp_path: Path) -> None:
    folder = save_step(tmp_path, 1)
    summary = ManifestSummaries(Storage()).of(folder)
    (folder / ".nfs0000123").touch()
    assert other_files(summary, Storage()) == []
    (folder / "README").touch()
    assert other_files(summary, Storage()) == ["README"]


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


def test_what_cannot_be_read_is_not_called_damaged(tmp_path: Path) -> None:
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
