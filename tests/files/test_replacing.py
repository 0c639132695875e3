"""A place is judged before the work, and a refused write says what can be done about that refusal."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO

import pytest

from megatron.errors import ConfigError, StorageError
from megatron.files.failures import storage_error
from megatron.files.replacing import (
    check_writable,
    move,
    replace_file,
    sync_path,
    temporary_name,
    write_atomically,
    write_new,
)


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_free_space_is_named_if_it_is_the_cause(tmp_path: Path, number: int) -> None:
    text = str(storage_error(tmp_path / "x", OSError(number, os.strerror(number))))
    assert "bytes are free). Free some space" in text


def test_a_writable_path_is_left_unchanged(tmp_path: Path) -> None:
    check_writable(tmp_path / "new" / "folder" / "file")
    (tmp_path / "file").write_text("old")
    check_writable(tmp_path / "file")
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "old"


def test_an_unwritable_path(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=r"Cannot write .*: Is a directory\. Use the path of a file\."):
        check_writable(tmp_path)
    with pytest.raises(StorageError, match="Is a directory"):
        write_atomically(tmp_path, lambda stream: None)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"Cannot write .*file/x: Not a directory\. Use a writable folder"):
        check_writable(tmp_path / "file" / "x")


def test_an_unexpanded_tilde_is_rejected() -> None:
    with pytest.raises(ConfigError, match="~/x.bin begins with ~, which the shell did not expand"):
        temporary_name(Path("~/x.bin"))


@pytest.mark.parametrize("durable", [True, False])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, durable: bool) -> None:
    path = tmp_path / "file"
    replace_file(path, b"one", durable=durable)
    replace_file(path, lambda stream: stream.write(b"two"), durable=durable)
    assert path.read_bytes() == b"two"

    def break_off(stream: BinaryIO) -> None:
        stream.write(b"thr")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace_file(path, break_off, durable=durable)
    assert path.read_bytes() == b"two" and list(tmp_path.iterdir()) == [path]


def test_content_and_name_are_on_the_disk_before_the_file_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    sync, rename = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        done.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        sync(descriptor)

    def renamed(source: Path, target: Path) -> None:
        done.append("rename")
        rename(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    replace_file(tmp_path / "a", b"content")
    assert done == ["file", "rename", "folder"]
    move(tmp_path / "a", tmp_path / "b")
    assert done == 2 * ["file", "rename", "folder"]
    replace_file(tmp_path / "c", b"content", durable=False)
    move(tmp_path / "c", tmp_path / "d", durable=False)
    assert done[6:] == ["rename", "rename"]
    (tmp_path / "folder").mkdir()
    move(tmp_path / "folder", tmp_path / "final")
    assert done[8:] == ["folder", "rename", "folder"]


def test_a_file_system_that_cannot_sync_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (errno.EINVAL, errno.EIO):
        failure = OSError(number, os.strerror(number))
        monkeypatch.setattr(os, "fsync", lambda descriptor, failure=failure: (_ for _ in ()).throw(failure))
        if number == errno.EINVAL:
            sync_path(tmp_path)
            continue
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            sync_path(tmp_path)


def test_a_new_file_overwrites_nothing(tmp_path: Path) -> None:
    write_new(tmp_path / "a", b"one")
    with pytest.raises(FileExistsError):
        write_new(tmp_path / "a", b"two")
    assert (tmp_path / "a").read_bytes() == b"one"
