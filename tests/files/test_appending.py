"""Lines at the end of a file: after half a line, through no link, and none of the log's failures is raised."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.files.appending import LogCopy, append_line


def test_a_line_begins_on_a_line_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    append_line(path, "one")
    with path.open("a") as stream:
        stream.write("tw")
    append_line(path, "three", durable=True)
    assert path.read_text() == "one\ntw\nthree\n"


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
