"""Copying stretches of files by every way the system has."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from megatron.files.exact import write_at
from trident.corpus.preprocess import copying
from trident.corpus.preprocess.copying import copy_into


def copied(tmp_path: Path, data: bytes, size: int, offset: int) -> tuple[int, bytes]:
    """What `copy_into` says, and the target afterwards."""
    (tmp_path / "source").write_bytes(data)
    (tmp_path / "target").write_bytes(b"")
    with (tmp_path / "source").open("rb") as source, (tmp_path / "target").open("r+b") as target:
        reached = copy_into(source.fileno(), target.fileno(), size, offset)
    return reached, (tmp_path / "target").read_bytes()


@pytest.mark.parametrize("refused", [(), ("copy_file_range",), ("copy_file_range", "sendfile")])
def test_every_copy_method_gives_the_same_bytes(
    tmp_path: Path, refused: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*rest: object) -> int:
        raise OSError(errno.ENOSYS, "no such call")

    for name in refused:
        monkeypatch.setattr(os, name, refuse, raising=False)
    monkeypatch.setattr(copying, "_CALL_BYTES", 1000)
    data = os.urandom(5000)
    assert copied(tmp_path, data, 4321, 17) == (4321, bytes(17) + data[:4321])


def test_a_truncated_source_is_reported(tmp_path: Path) -> None:
    assert copied(tmp_path, b"abc", 10, 0)[0] == 3


def test_other_failures_are_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*rest: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "copy_file_range", full, raising=False)
    with pytest.raises(OSError, match="No space left"):
        copied(tmp_path, b"abc", 3, 0)


def test_bytes_are_written_at_an_offset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda target, data, offset: write(target, data[:2], offset))
    (tmp_path / "target").write_bytes(b"........")
    with (tmp_path / "target").open("r+b") as target:
        write_at(target.fileno(), b"abcde", 2)
    assert (tmp_path / "target").read_bytes() == b"..abcde."
