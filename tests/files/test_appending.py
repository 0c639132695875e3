"""Lines at the end of a file: after half a line, through no link, and none of the log's failures is raised."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron.checkpoint.storage import DISK, write_file
from megatron.files.appending import LogCopy, append_line
from megatron.files.replacing import replace_file
from megatron.observe.metrics_file import MetricsFile


def test_a_line_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, "one")
    with path.open("a") as stream:
        stream.write("tw")
    append_line(path, "three", durable=True)
    assert path.read_text() == "one\ntw\nthree\n"


def test_the_umask_alone_decides_who_may_read_and_write(tmp_path: Path) -> None:
    makers: dict[str, Callable[[Path], object]] = {
        "log.txt": LogCopy,
        "events.jsonl": lambda path: append_line(path, "{}"),
        "metrics.jsonl": MetricsFile,
        "run.json": lambda path: replace_file(path, b"{}"),
        "manifest.json": lambda path: write_file(DISK, path, b"{}"),
    }
    for umask, mode in ((0o002, 0o664), (0o077, 0o600)):
        before = os.umask(umask)
        try:
            for name, make in makers.items():
                path = tmp_path / f"{mode:o}-{name}"
                make(path)
                assert path.stat().st_mode & 0o777 == mode, name
        finally:
            os.umask(before)


def test_a_link_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic links"):
        append_line(tmp_path / "link", "one")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no full device here")
def test_a_full_disk_is_counted_by_the_log() -> None:
    copy = LogCopy("/dev/full")
    assert not copy.append("one\n") and not copy.append("two\n")
    assert copy.lost == 2 and copy.reason == "No space left on device"
    copy.close()
