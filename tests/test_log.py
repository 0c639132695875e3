"""The copy of what a process says."""

from __future__ import annotations

import subprocess
import sys
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


def test_sigterm_in_a_finalizer_ends_the_program() -> None:
    """Python drops exceptions of finalizers: the signal would be lost."""
    program = (
        "import os, signal, time\n"
        "from megatron import log\n"
        "class Closing:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.01)\n"
        "def main():\n"
        "    log.interrupt_on_sigterm()\n"
        "    Closing()\n"
        "    time.sleep(30)\n"
        "log.exit_with(main)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert finished.returncode == 128 + 15, finished.stderr
    assert "ended by SIGTERM" in finished.stderr
