"""A save that fails at any point leaves every earlier checkpoint intact and reports the cause.

Processes that die are in `retention/test_interruptions.py`, and power cuts in the campaign "crash-states".
"""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import pytest

from megatron.checkpoint.storage import Storage
from megatron.errors import StorageError
from tests.checkpoint.retention.checkpoints import MortalStorage, Unsynced, hidden, loaded_seed, save_step, steps


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_failure_at_any_operation_keeps_the_earlier_checkpoint(tmp_path: Path, number: int) -> None:
    save_step(tmp_path, 1)
    hint = tmp_path / "latest_checkpointed_iteration.txt"
    counted = MortalStorage()
    save_step(tmp_path / "other", 2, storage=counted)
    assert {"mkdir", "create", "write", "sync", "sync directory", "rename"} <= set(counted.operations)
    refused = 0
    for place, operation in enumerate(counted.operations):
        try:
            save_step(tmp_path, 2, storage=MortalStorage(place, dies=False, number=number))
        except StorageError as failure:
            refused += 1
            for part in (str(tmp_path), errno.errorcode[number], "free space: ", "needs"):
                assert part in str(failure)
        assert not hidden(tmp_path), operation
        assert loaded_seed(tmp_path) == steps(tmp_path)[-1]
        if steps(tmp_path) == [1]:
            assert hint.read_text() == "1"
        else:  # only what comes after the rename has failed
            assert hint.read_text() in ("1", "2")
            shutil.rmtree(tmp_path / "iter_0000002")
            hint.write_text("1")
    assert refused > 6


class Short(Unsynced):
    """Takes half of what it is given at a time."""

    def write(self, handle: int, content: memoryview) -> int:
        return super().write(handle, content[: max(1, len(content) // 2)])


def test_short_writes_are_finished(tmp_path: Path) -> None:
    save_step(tmp_path, 1, storage=Short())
    assert loaded_seed(tmp_path) == 1


def test_a_write_of_zero_bytes_is_a_failure(tmp_path: Path) -> None:
    class Stuck(Unsynced):
        def write(self, handle: int, content: memoryview) -> int:
            return 0

    with pytest.raises(StorageError, match="accepts no more bytes"):
        save_step(tmp_path, 1, storage=Stuck())


def test_insufficient_disk_space_is_reported_before_writing(tmp_path: Path) -> None:
    class Small(MortalStorage):
        def free_bytes(self, path: Path) -> int | None:
            return 100

    storage = Small()
    with pytest.raises(
        StorageError, match=r"not enough space for a checkpoint in .*: it needs \d+ bytes, 100 bytes are"
    ):
        save_step(tmp_path, 1, storage=storage)
    assert "write" not in storage.operations


@pytest.mark.parametrize(
    ("number", "advice"),
    [
        (errno.ENOENT, r"The --save directory must be shared by all nodes"),
        (errno.EROFS, r"Read-only file system \(EROFS\).* Make it writable for this user, or use another --save dir"),
        (errno.ENOSPC, r"\(ENOSPC\).* Free some space or use another --save directory"),
    ],
)
def test_what_refuses_a_file_is_told_with_the_way_out(tmp_path: Path, number: int, advice: str) -> None:
    class Refusing(Unsynced):
        def create(self, path: Path) -> int:
            raise OSError(number, os.strerror(number), str(path))

    with pytest.raises(StorageError, match=advice):
        save_step(tmp_path, 1, storage=Refusing())


def test_an_existing_file_at_the_path_is_a_storage_error(tmp_path: Path) -> None:
    (tmp_path / "taken").touch()
    with pytest.raises(StorageError, match=r"cannot write .*taken.*EEXIST|ENOTDIR"):
        save_step(tmp_path / "taken", 1, storage=Storage())
