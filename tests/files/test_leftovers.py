"""Temporary files of killed runs are removed when, and only when, their process is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron.data.formats.indexed import IndexedDataset
from megatron.data.formats.indexed_writer import IndexedWriter
from megatron.errors import DataError
from megatron.files.replacing import remove_leftovers, start_write_back, temporary_name


def gone() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    return process.pid


def test_only_files_of_processes_that_are_gone_are_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "out.bin"
    mine = temporary_name(path)
    dead = mine.with_name(mine.name.replace(f"-{os.getpid()}-", f"-{gone()}-"))
    elsewhere = dead.with_name(dead.name.replace(dead.name.split(".")[3].split("-")[0], "0" * 8))
    other = dead.with_name(dead.name.replace(".out.bin.", ".out.bin.bak."))
    for file in (mine, dead, elsewhere, other):
        file.touch()
    assert len({mine, dead, elsewhere, other}) == 4
    with IndexedWriter(tmp_path / "out", np.uint16) as writer:
        writer.add_document([[1, 2]])
    assert mine.exists() and elsewhere.exists() and other.exists() and not dead.exists()
    assert f"Removed {dead}" in capsys.readouterr().err
    assert remove_leftovers(path) == [] == remove_leftovers(tmp_path / "nowhere" / "out.bin")


def test_reserved_tokens_must_have_been_written(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "out", np.uint16) as writer:
        writer.add_document([[1, 2]])
        path, offset = writer.reserve([3, 1])
        writer.add_document([[7]])
        assert offset == 4
        descriptor = os.open(path, os.O_WRONLY)
        os.pwrite(descriptor, np.array([3, 4, 5, 6], np.uint16).tobytes(), offset)
        start_write_back(descriptor, offset, 8)
        os.close(descriptor)
    data = IndexedDataset(tmp_path / "out")
    assert [data[index].tolist() for index in range(4)] == [[1, 2], [3, 4, 5], [6], [7]]
    with (
        pytest.raises(DataError, match=r"out\.bin: 0 bytes were written, but 2 tokens take 4; nothing was published"),
        IndexedWriter(tmp_path / "out", np.uint16) as writer,
    ):
        writer.reserve([2])
    assert sorted(file.name for file in tmp_path.iterdir()) == ["out.bin", "out.idx"]
