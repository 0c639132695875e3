"""Copies of checkpoints: equal to the last byte, or refused."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint import SaveOptions, save, verify
from megatron.checkpoint.retention.copying import copy_checkpoint
from megatron.checkpoint.storage import DISK, Storage
from megatron.config import ParallelRequest
from megatron.errors import CheckpointError, DamagedError, StorageError
from megatron.parallel.joining import open_mesh
from tests.checkpoint.made.fake_pieces import cut_for_ranks, make_state
from tests.checkpoint.retention.checkpoints import MESH, hidden, loaded_seed, save_step, steps
from tests.helpers.ranks import run_ranks


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def copy(source: Path, directory: Path, *, replaces: bool = False, storage: Storage = DISK) -> Path | None:
    return copy_checkpoint(source, directory, MESH, flag="--save-secondary", replaces=replaces, storage=storage)


def test_a_copy_has_the_same_bytes_and_is_made_once(tmp_path: Path) -> None:
    source = save_step(tmp_path / "source", 3)
    made = copy(source, tmp_path / "deep" / "copies")
    assert made == tmp_path / "deep" / "copies" / "iter_0000003"
    assert contents(made) == contents(source)
    assert (made.parent / "latest_checkpointed_iteration.txt").read_text() == "3"
    (made.parent / "latest_checkpointed_iteration.txt").unlink()  # as if killed after the folder appeared
    assert copy(source, made.parent) is None
    assert (made.parent / "latest_checkpointed_iteration.txt").read_text() == "3"
    assert copy(source, made.parent, replaces=True) is None
    named = source.rename(tmp_path / "best")  # the copy has the name by which it is found
    assert copy(named, tmp_path / "other") == tmp_path / "other" / "iter_0000003"


def test_an_older_copy_is_not_called_the_newest(tmp_path: Path) -> None:
    for step in (4, 3):
        copy(save_step(tmp_path / "source", step), tmp_path / "copies")
    assert steps(tmp_path / "copies") == [3, 4]
    assert (tmp_path / "copies" / "latest_checkpointed_iteration.txt").read_text() == "4"


@pytest.mark.parametrize("damage", ["flip", "short", "missing", "manifest"])
def test_a_damaged_checkpoint_is_not_copied(tmp_path: Path, damage: str) -> None:
    source = save_step(tmp_path / "source", 3)
    save_step(tmp_path / "copies", 2)
    file = source / "pieces_00000.safetensors"
    content = bytearray(file.read_bytes())
    expected = rf"{file} is damaged between bytes 1024 and 2048: .* It was not copied"
    if damage == "flip":
        content[1500] ^= 1
        file.write_bytes(content)
    elif damage == "short":
        file.write_bytes(content[:-1])
        expected = f"{file} has {len(content) - 1} bytes; its manifest expects {len(content)}"
    elif damage == "missing":
        file.unlink()
        expected = f"cannot read {file}: No such file or directory"
    else:
        (source / "manifest.json").write_text("{}")
        expected = "manifest.json is damaged"
    with pytest.raises(DamagedError, match=expected):
        copy(source, tmp_path / "copies")
    assert steps(tmp_path / "copies") == [2] and loaded_seed(tmp_path / "copies") == 2
    assert not hidden(tmp_path / "copies")


def test_a_manifest_that_changes_meanwhile_is_noticed(tmp_path: Path) -> None:
    source = save_step(tmp_path / "source", 3)
    other = save_step(tmp_path / "other", 3, seed=9)

    class Changing(Storage):
        def sync(self, handle: int) -> None:
            shutil.copy(other / "manifest.json", source / "manifest.json")

    with pytest.raises(DamagedError, match=r"manifest.json changed while it was being copied. Copy it again"):
        copy(source, tmp_path / "copies", storage=Changing())
    assert list((tmp_path / "copies").iterdir()) == []


def test_another_checkpoint_of_the_step_is_replaced_only_if_asked(tmp_path: Path) -> None:
    source, directory = save_step(tmp_path / "source", 3), tmp_path / "copies"
    there = save_step(directory, 3, seed=9)
    with pytest.raises(CheckpointError, match=f"{there} is a different checkpoint of step 3"):
        copy(source, directory)
    there.rename(directory / ".old-iter_0000003-0123")  # a save that replaced it died
    with pytest.raises(CheckpointError, match="is a different checkpoint of step 3"):
        copy(source, directory)
    assert loaded_seed(directory) == 9
    assert copy(source, directory, replaces=True) == there
    assert contents(there) == contents(source) and not hidden(directory)
    shutil.rmtree(there)
    there.symlink_to(source)
    with pytest.raises(CheckpointError, match="is a different checkpoint of step 3"):
        copy(source, directory)


def test_a_copy_that_lost_bytes_is_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = save_step(tmp_path / "source", 3)
    made = copy(source, tmp_path / "copies")
    assert made is not None
    (made / "pieces_00000.safetensors").write_bytes(b"")
    assert copy(source, tmp_path / "copies") == made
    assert contents(made) == contents(source)
    assert f"copying to {made} again: " in capsys.readouterr().err


def test_too_little_space_is_reported_with_the_sizes(tmp_path: Path) -> None:
    source = save_step(tmp_path / "source", 3)
    need_bytes = sum(len(content) for name, content in contents(source).items() if name != "manifest.json")

    class Small(Storage):
        def free_bytes(self, path: Path) -> int | None:
            return 1000

    with pytest.raises(
        StorageError,
        match=f"not enough space for a checkpoint in .*copies: it needs {need_bytes} bytes, 1000 bytes are free, "
        f"{need_bytes - 1000} too few.* use another --save-secondary directory",
    ):
        copy(source, tmp_path / "copies", storage=Small())


class Recording(Storage):
    """Remembers the tensor files that this rank makes, and makes none if it is full."""

    def __init__(self, is_full: bool) -> None:
        self.created: list[str] = []
        self._is_full = is_full

    def create(self, path: Path) -> int:
        if self._is_full:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.created += [path.name] if path.name.startswith("pieces") else []
        return super().create(path)


def copy_part(rank: int, source: str, directory: str) -> tuple[str, str, list[str]]:
    """Saves with two ranks and copies twice, the first time with a full disk; returns what came of it."""
    mesh = open_mesh(ParallelRequest())
    pieces = cut_for_ranks(make_state(kinds=("master",), seed=7), 2, 7)[rank]
    path = save(Path(source), 7, pieces, {"seed": 7}, mesh, SaveOptions(chunk_bytes=128))
    with pytest.raises(StorageError) as refused:
        copy_checkpoint(path, Path(directory), mesh, flag="--save-secondary", storage=Recording(rank == 1))
    storage = Recording(False)
    copied = copy_checkpoint(path, Path(directory), mesh, flag="--save-secondary", storage=storage)
    return str(refused.value), str(copied), storage.created


def test_two_ranks_share_the_files(tmp_path: Path) -> None:
    (refused, first, own), (reason, second, others) = run_ranks(
        copy_part, 2, str(tmp_path / "source"), str(tmp_path / "copies")
    )
    assert "No space left on device" in reason and refused == f"rank 1: {reason}"
    made = tmp_path / "copies" / "iter_0000007"
    assert first == second == str(made)
    assert (own, others) == (["pieces_00000.safetensors"], ["pieces_00001.safetensors"])
    assert contents(made) == contents(tmp_path / "source" / "iter_0000007")
    assert verify(made).step == 7 and loaded_seed(made.parent) == 7 and not hidden(made.parent)
