"""A process that dies while it deletes or copies: a whole checkpoint is always found, and the rest is cleaned up."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint import find, verify
from megatron.checkpoint.publish import remove_checkpoint
from megatron.checkpoint.retention.copying import copy_checkpoint
from megatron.checkpoint.retention.pruning import Pruner, RetentionRules
from megatron.checkpoint.storage import Storage
from megatron.errors import StorageError
from tests.checkpoint.retention.checkpoints import (
    MESH,
    Death,
    MortalStorage,
    Unsynced,
    hidden,
    loaded_seed,
    save_step,
    steps,
)


def at_every_operation(start: Path, tmp_path: Path, work: Callable[[Path, Storage], object]) -> list[Path]:
    """Copies of a folder in which `work` died at its first, second, ... operation; the last one survived it."""
    counted = MortalStorage()
    whole = tmp_path / "whole"
    shutil.copytree(start, whole)
    work(whole, counted)
    folders = []
    for place in range(len(counted.operations)):
        folder = tmp_path / f"died{place}"
        shutil.copytree(start, folder)
        with pytest.raises(Death):
            work(folder, MortalStorage(place))
        folders.append(folder)
    return [*folders, whole]


def all_are_whole(directory: Path) -> bool:
    """Whether everything that has its final name is good; one that was moved aside may be half removed."""
    return all(verify(candidate.path) for candidate in find(directory) if not candidate.path.name.startswith("."))


def test_a_deletion_that_dies_leaves_the_checkpoint_whole_or_gone(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path / "start", step)
    folders = at_every_operation(
        tmp_path / "start", tmp_path, lambda folder, storage: remove_checkpoint(folder / "iter_0000001", storage)
    )
    left = [steps(folder) for folder in folders]
    assert left[0] == [1, 2] and left[1:] == [[2]] * (len(left) - 1) and len(left) > 4
    assert any(hidden(folder) for folder in folders)
    for folder in folders:
        assert loaded_seed(folder) == 2 and all_are_whole(folder)
        save_step(folder, 3)
        assert not hidden(folder)


def test_a_save_that_dies_with_its_deletions_loses_nothing(tmp_path: Path) -> None:
    for step in (1, 2):
        save_step(tmp_path / "start", step)

    def work(folder: Path, storage: Storage) -> None:
        retention = Pruner(RetentionRules(1), storage)
        save_step(folder, 3, storage=storage, after_commit=lambda path, mesh: retention.apply(path) and None)

    folders = at_every_operation(tmp_path / "start", tmp_path, work)
    seeds = [loaded_seed(folder) for folder in folders]
    assert seeds == sorted(seeds) and set(seeds) == {2, 3}  # once the new one counts, it counts for good
    assert [steps(folder) for folder in folders][-1] == [3]
    for folder, seed in zip(folders, seeds, strict=True):
        assert all_are_whole(folder)
        assert seed == 3 or steps(folder) == [1, 2]  # nothing goes before the new one is there
        Pruner(RetentionRules(1), Storage()).apply(save_step(folder, 4))
        assert steps(folder) == [4] and not hidden(folder)


@pytest.mark.parametrize("other", [None, 2], ids=["new step", "same step"])
def test_a_copy_that_dies_leaves_both_folders_whole(tmp_path: Path, other: int | None) -> None:
    source = save_step(tmp_path / "source", 2)
    save_step(tmp_path / "start", 1)
    if other is not None:
        save_step(tmp_path / "start", other, seed=9)

    def work(folder: Path, storage: Storage) -> None:
        copy_checkpoint(source, folder, MESH, flag="--save-secondary", replaces=True, storage=storage)

    folders = at_every_operation(tmp_path / "start", tmp_path, work)
    seeds = [loaded_seed(folder) for folder in folders]
    before = 1 if other is None else 9
    assert seeds[0] == before and seeds[-1] == 2 and set(seeds) == {before, 2}
    assert seeds == sorted(seeds, key=lambda seed: seed == 2)
    for folder in folders:
        assert all_are_whole(folder)
        work(folder, Unsynced())
        assert loaded_seed(folder) == 2
        save_step(folder, 3)
        assert steps(folder) == [1, 2, 3] and not hidden(folder)
    assert loaded_seed(tmp_path / "source") == 2 and not hidden(tmp_path / "source")


def test_a_refusal_at_any_operation_of_a_copy_is_typed_and_harmless(tmp_path: Path) -> None:
    source = save_step(tmp_path / "source", 2)
    counted = MortalStorage()
    copy_checkpoint(source, tmp_path / "counted", MESH, flag="--save-secondary", storage=counted)
    refused = 0
    for place in range(len(counted.operations)):
        folder = tmp_path / f"refused{place}"
        save_step(folder, 1)
        try:
            copy_checkpoint(source, folder, MESH, flag="--save-secondary", storage=MortalStorage(place, dies=False))
        except StorageError as failure:
            refused += 1
            assert "cannot write" in str(failure) and "--save-secondary" in str(failure)
        assert loaded_seed(folder) in (1, 2) and all_are_whole(folder)
        assert copy_checkpoint(source, folder, MESH, flag="--save-secondary") in (None, folder / "iter_0000002")
        assert loaded_seed(folder) == 2 and not hidden(folder)
    assert 5 < refused < len(counted.operations)
