"""A place is judged before the work, and a refused write says what can be done about that refusal."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron.data.formats.atomic_files import check_writable, storage_error, temporary_beside, write_atomically
from megatron.errors import ConfigError, StorageError


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_free_space_is_named_if_it_is_the_cause(tmp_path: Path, number: int) -> None:
    text = str(storage_error(tmp_path / "x", OSError(number, os.strerror(number))))
    assert "bytes are free there). Free some space" in text


@pytest.mark.parametrize("number", [errno.EISDIR, errno.EACCES, errno.EROFS, errno.ENOTDIR])
def test_free_space_is_not_named_elsewhere(tmp_path: Path, number: int) -> None:
    text = str(storage_error(tmp_path / "x", OSError(number, os.strerror(number))))
    assert os.strerror(number) in text and "bytes are free" not in text and "Free some" not in text


def test_a_writable_path_is_left_unchanged(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / "file")
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


def test_an_unwritable_path(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"Cannot write .*: Is a directory\. Give the path of a file\."):
        check_writable(tmp_path)
    with pytest.raises(StorageError, match="Is a directory"):
        write_atomically(tmp_path, lambda stream: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Cannot write .*file/x: Not a directory\. Choose a folder"):
        check_writable(tmp_path / "file" / "x")


def test_an_unexpanded_tilde_is_rejected() -> None:
    with pytest.raises(ConfigError, match="~/x.bin begins with ~, which the shell did not expand"):
        temporary_beside(Path("~/x.bin"))
