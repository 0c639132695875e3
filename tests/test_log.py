"""What a process says, the copy of it, and how the process ends."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import resource
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron import log, process_exit
from megatron.errors import ConfigError, DataError, ExitCode


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Path]:
    """A file that receives the log."""
    log.copy_to(None)  # warnings that were kept are those of other tests
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


def test_the_log_copy_begins_with_the_warnings_before_it(tmp_path: Path) -> None:
    log.warning("nobody keeps this")
    log.keep_warnings()
    log.info("hello")
    log.warning("careful")
    log.shared_warning("of all ranks")
    log.copy_to(tmp_path / "log.txt")
    log.warning("later")
    log.copy_to(None)
    log.copy_to(tmp_path / "again.txt")
    log.copy_to(None)
    assert (tmp_path / "log.txt").read_text() == "warning: careful\nwarning: of all ranks\nwarning: later\n"
    assert (tmp_path / "again.txt").read_text() == ""


def test_a_copy_that_cannot_be_written_is_one_warning(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.info("before")
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, limit[1]))
    try:
        for number in range(3):
            log.info(f"message {number}")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert copy.read_text() == "before\nmes"
    log.info("after")
    assert copy.read_text() == "before\nmes\nafter\n"
    log.warn_of_lost_output()
    said = capsys.readouterr().err.splitlines()
    assert [line for line in said if "warning" in line] == [
        f"warning: {copy} cannot be written: File too large. The run continues and retries with every message.",
        f"warning: 4 messages are missing in {copy} (File too large).",
    ]


FULL_OUTPUT = """
import sys
from megatron import log, process_exit
def main():
    if sys.argv[1] == "optional":
        log.make_optional()
    for number in range(3):
        log.line("x" * 10_000)
    log.warn_of_lost_output()
    return 0
process_exit.exit_with(main)
"""


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_behind_the_output_ends_no_run_but_a_tool() -> None:
    with open("/dev/full", "w") as full:
        kept, ended = (
            subprocess.run([sys.executable, "-c", FULL_OUTPUT, kind], stdout=full, stderr=subprocess.PIPE, text=True)
            for kind in ("optional", "needed")
        )
    assert (kept.returncode, kept.stderr) == (
        0,
        "warning: 3 messages are missing in the standard streams (No space left on device).\n",
    )
    assert ended.returncode == 1 and "No space left on device" in ended.stderr


def test_messages_and_errors_show_no_secret(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.info("connecting to me:s3same@db.example.com")
    log.warning("Authorization: Bearer s3same")
    log.error("HF_TOKEN=s3same")
    log.record("user:s3same@host:22")
    told: list[str] = []
    with contextlib.ExitStack() as stack:
        stack.callback(process_exit.on_failure(lambda code, text: told.append(text) or False))
        process_exit.show_failure(ConfigError("no such file me:s3same@db.example.com"))
    shown = capsys.readouterr().err + copy.read_text() + "".join(told)
    assert "s3same" not in shown and shown.count("***") == 5 + 4 + 1
    log.line("a result: HF_TOKEN=text of a corpus")  # data is shown as it is
    assert capsys.readouterr().out == "a result: HF_TOKEN=text of a corpus\n"


def test_characters_that_steer_a_terminal_are_escaped(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A name from a file may hold anything, lone surrogates included, which no stream would take."""
    hostile = "\x1b]0;owned\x07\x9b2J\r\u202ename\ud800"
    visible = r"\u001b]0;owned\u0007\u009b2J\u000d\u202ename\ud800"
    log.line(hostile)
    log.warning(f"two\n\tlines, é 字 🙂 {hostile}")
    log.set_rank(0, 2)
    log.line(hostile)
    shown = capsys.readouterr()
    assert shown.out == visible + "\n"
    assert shown.err == f"warning: two\n\tlines, é 字 🙂 {visible}\n"
    assert copy.read_text() == f"{visible}\nwarning: two\n\tlines, é 字 🙂 {visible}\n{visible}\n"
    assert json.loads(visible.join('""')) == hostile


def test_the_error_of_another_rank_carries_its_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log._OUTPUT, "rank", 0)
    log.error("bad data", rank=3)
    log.error("bad data")
    assert capsys.readouterr().err == "[rank 3] error: bad data\n[rank 0] error: bad data\n"


ERASE = "\r\x1b[K"


@pytest.fixture
def no_status() -> Iterator[None]:
    """Ends what a test leaves on the last line."""
    yield
    log.close_status()
    log.set_rank(0, 1)


@pytest.mark.usefixtures("no_status")
def test_messages_appear_above_the_last_line(copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log.open_status(with_lines=True)
    log.info("nothing is drawn yet")
    log.status("10 %")
    log.warning("careful")
    log.line("result")
    log.status("20 %")
    log.close_status()
    log.info("after")
    out, err = capsys.readouterr()
    assert out == "result\n"
    assert err == (
        f"nothing is drawn yet\n{ERASE}10 %{ERASE}warning: careful\n{ERASE}10 %{ERASE}{ERASE}10 %{ERASE}20 %\nafter\n"
    )
    assert copy.read_text() == "nothing is drawn yet\nwarning: careful\nresult\nafter\n"


@pytest.mark.usefixtures("no_status")
def test_a_job_draws_a_last_line_and_removes_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert log.status_line() is None
    monkeypatch.setattr(log, "is_terminal", lambda name: name == "stderr")
    draw = log.status_line()
    assert draw is not None
    draw("10 %")
    log.warning("careful")
    draw("")
    draw("")
    log.info("after")
    assert capsys.readouterr().err == f"{ERASE}10 %{ERASE}warning: careful\n{ERASE}10 %{ERASE}after\n"


@pytest.mark.usefixtures("no_status")
@pytest.mark.parametrize(("with_lines", "first_prints"), [(True, True), (False, False)])
def test_rank_0_prints_results_where_they_go_to_the_terminal_of_its_last_line(
    with_lines: bool, first_prints: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    for rank in (0, 1):
        log.set_rank(rank, 2)
        log.open_status(with_lines=with_lines)
        log.status("10 %")
        log.line(f"from {rank}")
        log.warning("hm")
        log.close_status()
        log.line(f"after from {rank}")
        out, err = capsys.readouterr()
        assert ("from 0\n" in out.splitlines(True)) is (first_prints and rank == 0)
        assert ("from 1\n" in out.splitlines(True)) is (not first_prints and rank == 1)
        assert ("after from 1\n" in out) is (rank == 1)
        assert f"{ERASE}[rank {rank}] warning: hm\n" in err  # another rank first erases what rank 0 has drawn
        assert ("10 %" in err) is (rank == 0)


def test_what_takes_long_is_shown_while_nothing_else_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(log, "_SILENCE_SECONDS", 0.05)
    shown = ""
    with log.show_activity_when_quiet():
        log.set_activity("waiting for the test")
        while shown.count("... waiting for the test") < 2:
            shown += capsys.readouterr().err
            time.sleep(0.01)
        monkeypatch.setattr(log._OUTPUT, "status", log._Status(is_drawn_here=True, toggles_lines=False))
        deadline = time.monotonic() + 60
        while capsys.readouterr().err:  # a line that was under way
            assert time.monotonic() < deadline, "a bar shows as much"
            time.sleep(0.3)
    log.info("ready")
    assert capsys.readouterr().err.endswith("ready\n")


CLOSED_OUTPUT = """
import os, sys
from megatron import log, process_exit
def main():
    log.info("begins")
    sys.stdin.read()  # until the reader is gone
    if sys.argv[1] == "flushed":
        log.line("x")
    if sys.argv[1] == "another pipe":
        raise BrokenPipeError(32, "Broken pipe")
    return 0
process_exit.exit_with(main)
"""


@pytest.mark.parametrize("way", ["flushed", "another pipe"])
def test_a_closed_output_ends_a_program_without_a_word(way: str) -> None:
    command = [sys.executable, "-c", CLOSED_OUTPUT, way]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdin is not None and process.stderr is not None
        if way != "another pipe":
            process.stdout.close()
        process.stdin.close()
        said = process.stderr.read()
    if way == "another pipe":
        assert process.returncode == 1 and "BrokenPipeError" in said
    else:
        assert (process.returncode, said) == (141, "begins\n")


def test_sigterm_in_a_finalizer_ends_the_program() -> None:
    """Python drops exceptions of finalizers: the signal would be lost."""
    program = (
        "import os, signal, time\n"
        "from megatron import process_exit\n"
        "class Closing:\n"
        "    def __del__(self):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "        time.sleep(0.01)\n"
        "def main():\n"
        "    process_exit.interrupt_on_sigterm()\n"
        "    Closing()\n"
        "    time.sleep(30)\n"
        "process_exit.exit_with(main)\n"
    )
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert finished.returncode == 128 + 15, finished.stderr
    assert "terminated by SIGTERM" in finished.stderr


class Listener:
    """Is told of errors."""

    def __init__(self, shows: bool = False) -> None:
        self.told: list[tuple[int, str]] = []
        self.shows = shows

    def __call__(self, code: int, text: str) -> bool:
        self.told.append((code, text))
        return self.shows


def test_an_error_is_shown_once_and_its_listeners_are_called(capsys: pytest.CaptureFixture[str]) -> None:
    listener = Listener()
    forget = process_exit.on_failure(listener)
    failure = DataError("the file is empty")
    try:
        with pytest.raises(DataError), process_exit.showing_failures():
            raise failure
        assert process_exit.show_failure(failure) == 65
    finally:
        forget()
    assert listener.told == [(65, "the file is empty")]
    assert capsys.readouterr().err == "error: the file is empty\n"


def test_an_error_that_a_listener_shows_is_not_shown_here(capsys: pytest.CaptureFixture[str]) -> None:
    shows, recorder = Listener(shows=True), Listener()
    forget = [process_exit.on_failure(shows), process_exit.on_failure(recorder, only_if_shown=True)]
    try:
        assert process_exit.show_failure(RuntimeError("odd")) == 1
    finally:
        for taken_back in forget:
            taken_back()
    assert capsys.readouterr().err == ""
    assert [code for code, _ in shows.told] == [1] and recorder.told == []
    assert "RuntimeError: odd" in shows.told[0][1]


def test_a_rank_that_is_ended_meanwhile_repeats_no_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """All ranks have the same wrong flag: the launcher ends the others as soon as rank 0 has shown it."""
    waits: list[float] = []
    monkeypatch.setattr(process_exit.time, "sleep", waits.append)
    try:
        log.set_rank(0, 2)
        process_exit.show_failure(DataError("wrong"))
        assert waits == []
        log.set_rank(1, 2)
        process_exit.show_failure(DataError("wrong"))
        assert waits == [process_exit._FIRST_RANK_SECONDS]
        assert capsys.readouterr().err.count("wrong") == 2
        alike = DataError("alike")
        alike.is_on_all_ranks = True
        assert process_exit.show_failure(alike) == 65
        assert waits == [process_exit._FIRST_RANK_SECONDS] * 2, "rank 0 shows it before this rank ends"
        assert capsys.readouterr().err == ""
        log.set_rank(0, 2)
        assert process_exit.show_failure(DataError("alike")) == 65
        assert "alike" in capsys.readouterr().err
    finally:
        log.set_rank(0, 1)


def test_a_missing_package_is_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert process_exit.show_failure(ModuleNotFoundError("No module named 'torch'", name="torch")) == ExitCode.USAGE
    assert f"torch is not installed for {sys.executable}. Activate the environment" in capsys.readouterr().err
    assert process_exit.show_failure(ModuleNotFoundError("No module named 'other'", name="other")) == 1
    assert "No module named 'other'" in capsys.readouterr().err


def test_a_warning_of_all_ranks_is_shown_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    for rank in (0, 1):
        log.set_rank(rank, 2)
        log.shared_warning("careful")
    log.set_rank(0, 1)
    assert capsys.readouterr().err == "warning: careful\n"


def test_the_width_is_that_of_the_terminal_of_the_stream() -> None:
    leader, terminal = os.openpty()
    try:
        fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 40, 0, 0))
        program = "from megatron import log; print(log.terminal_columns('stderr'), log.terminal_columns('stdout'))"
        done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=terminal, text=True)
    finally:
        os.close(leader)
        os.close(terminal)
    assert done.stdout == "40 80\n"
