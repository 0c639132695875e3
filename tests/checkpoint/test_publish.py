"""A folder takes its place under its name, and what dead saves left is settled."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from megatron.checkpoint import LoadedCheckpoint, find, load, load_newest
from megatron.checkpoint.publish import link_checkpoint, remove_checkpoint, remove_dead_links, sweep, sweep_at_start
from megatron.checkpoint.storage import Storage
from tests.checkpoint.made.fake_pieces import make_state, whole_sink
from tests.checkpoint.made.saved_state import MESH, RECORD, save_state


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    save_state(tmp_path, 3, seed=1)
    path = save_state(tmp_path, 3, seed=2)
    sink = whole_sink(make_state(seed=2))
    load(path, sink.wanted(), MESH)
    sink.check()
    assert not [entry for entry in tmp_path.iterdir() if entry.name.startswith(".")]


def test_a_folder_moved_aside_is_restored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = save_state(tmp_path, 3, seed=1)
    aside = path.rename(tmp_path / ".old-iter_0000003-0123456789abcdef")
    (tmp_path / ".tmp-iter_0000003-0123456789abcdef").mkdir()
    assert load_newest(tmp_path, whole_sink(make_state(seed=1)).wanted, MESH) == LoadedCheckpoint(RECORD, aside)
    save_state(tmp_path, 4)
    assert [candidate.path.name for candidate in find(tmp_path)] == ["iter_0000004", "iter_0000003"]
    assert "moving" in capsys.readouterr().err
    path.rename(aside)
    save_state(tmp_path, 3)
    assert not aside.exists()


def test_the_folder_in_place_is_preferred_only_if_it_is_valid(tmp_path: Path) -> None:
    path = save_state(tmp_path, 3)
    aside = tmp_path / ".old-iter_0000003-0123"
    shutil.copytree(path, aside)
    (path / "manifest.json").write_text("{}")
    sweep(tmp_path, Storage())
    assert aside.exists()
    shutil.copy(aside / "manifest.json", path)
    sweep(tmp_path, Storage())
    assert not aside.exists() and path.exists()


def test_leftovers_are_removed_and_other_files_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / ".tmp-iter_0000003-0af").mkdir()
    (tmp_path / ".tmp-latest-0af").touch()
    for name in (".run.lock", "notes.txt", "latest_checkpointed_iteration.txt", ".old-iter_x"):
        (tmp_path / name).touch()
    sweep(tmp_path, Storage())
    assert sorted(entry.name for entry in tmp_path.iterdir()) == [
        *(".old-iter_x", ".run.lock", "latest_checkpointed_iteration.txt", "notes.txt")
    ]
    assert f"removing {tmp_path}/.tmp-iter_0000003-0af, left behind by an interrupted save" in capsys.readouterr().err


def test_a_directory_that_cannot_be_listed_is_only_a_warning_at_the_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / ".tmp-latest-0af").touch()
    sweep_at_start(tmp_path, MESH)
    assert not list(tmp_path.iterdir())
    sweep_at_start(tmp_path / "none", MESH)
    assert f"could not clean up {tmp_path}/none: " in capsys.readouterr().err


def test_a_second_name_leads_to_the_checkpoint_and_disappears_with_it(tmp_path: Path) -> None:
    old, new = save_state(tmp_path, 3, seed=1), save_state(tmp_path, 4, seed=2)
    link_checkpoint(old, "latest-good", Storage())
    link_checkpoint(old, "epoch0-step3", Storage())
    link_checkpoint(new, "latest-good", Storage())  # of the newer one from now on
    (tmp_path / "elsewhere").symlink_to("nowhere")
    assert (tmp_path / "latest-good").readlink() == Path("iter_0000004")
    sink = whole_sink(make_state(seed=1))
    assert load_newest(tmp_path / "epoch0-step3", sink.wanted, MESH) is not None
    sink.check()
    remove_checkpoint(old, Storage())
    remove_dead_links(tmp_path, Storage())
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_symlink()) == ["elsewhere", "latest-good"]


def test_what_has_the_name_already_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine").write_text("notes")
    link_checkpoint(save_state(tmp_path, 3), "mine", Storage())
    assert (tmp_path / "mine").read_text() == "notes"
    assert "mine exists and is not a link, so it cannot link to iter_0000003" in capsys.readouterr().err


def test_a_link_or_a_cleanup_that_fails_is_only_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    class Stubborn(Storage):
        def make_link(self, path: Path, target: str) -> None:
            raise PermissionError(13, "Permission denied")

        def remove_tree(self, path: Path) -> None:
            raise PermissionError(13, "Permission denied")

    link_checkpoint(tmp_path / "iter_0000003", "good", Stubborn())
    assert "iter_0000003 is saved, but the link good could not be created: " in capsys.readouterr().err
    (tmp_path / ".tmp-iter_0000003-0af").mkdir()
    sweep(tmp_path, Stubborn())
    assert "could not clean up" in capsys.readouterr().err
