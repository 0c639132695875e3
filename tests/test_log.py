"""The copy of what a process says."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron import log


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """A file that receives the log."""
    path = tmp_path / "log.txt"
    log.copy_to(path)
    yield path
    log.copy_to(None)
    log.set_rank(0, 1)


def test_the_log_copy_contains_lines_printed_by_another_rank(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.set_rank(0, 2)
    log.line(" iteration 1")
    log.info("hello")
    log.warning("careful")
    assert capsys.readouterr().out == ""
    assert copy.read_text() == " iteration 1\nhello\n[rank 0] warning: careful\n"


def test_the_log_copy_can_be_ended(copy: Path) -> None:
    log.line("one")
    log.copy_to(None)
    log.line("two")
    assert copy.read_text() == "one\n"
