"""What is kept of the starts and ends of a run, and what a crash or a full disk leaves of it."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from megatron import process_exit
from megatron.errors import ExitCode, NumericsError, PeerLostError
from megatron.train.restarts import history as history_module
from megatron.train.restarts.history import HISTORY_NAME, STEP_NAME, RestartHistory, read_attempts

RUN = "0123456789abcdef"


def begun(folder: Path, resumed_step: int = 4, run_id: str = RUN) -> RestartHistory:
    """A history whose start was recorded."""
    history = RestartHistory()
    history.open(folder, run_id)
    history.started(resumed_step, "settings", (3,), "0.1")
    return history


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / HISTORY_NAME).read_text().splitlines()]


def train(history: RestartHistory, *steps: int, failure: BaseException | None = None) -> None:
    """Trains steps, then fails if asked to."""
    history.training_begins(steps[0])
    for step in steps:
        history.at(step)
    if failure is not None:
        raise failure
    history.training_ends()


def test_an_end_in_training_is_kept_with_its_error(tmp_path: Path) -> None:
    history = begun(tmp_path)
    with pytest.raises(NumericsError), history.recording():
        train(history, 5, 6, 7, failure=NumericsError("iteration 6: loss nan\nadvice", step=6))
    (attempt,) = read_attempts(tmp_path, RUN)
    assert (attempt.resumed_step, attempt.settings, attempt.batch_skips) == (4, "settings", (3,))
    assert (attempt.step, attempt.code, attempt.text) == (6, 77, "iteration 6: loss nan")
    assert attempt.has_ended and attempt.blames_step and not attempt.was_requested
    assert str(attempt).endswith("from iteration 4, ended at iteration 6, exit code 77: iteration 6: loss nan")
    assert [line["event"] for line in lines(tmp_path)] == ["start", "end"]


def test_the_step_of_another_error_is_the_one_in_progress(tmp_path: Path) -> None:
    history = begun(tmp_path)
    with pytest.raises(PeerLostError), history.recording():
        train(history, 5, 6, failure=PeerLostError("another rank ended"))
    (attempt,) = read_attempts(tmp_path, RUN)
    assert (attempt.step, attempt.code, attempt.was_requested, attempt.blames_step) == (6, 75, False, False)


@pytest.mark.parametrize(
    ("code", "text", "in_loop", "is_asked"),
    [
        (ExitCode.DONE, "", True, True),
        (ExitCode.REQUEUE, "", True, True),
        (ExitCode.REQUEUE, "terminated by SIGTERM: no step was in progress", False, True),
        (ExitCode.REQUEUE, "terminated by SIGTERM: another rank does not respond", True, False),
        (ExitCode.HANG, "rank 1 hangs", True, False),
        (ExitCode.HANG, "rank 1 hangs", False, False),
    ],
)
def test_which_ends_were_asked_for(tmp_path: Path, code: ExitCode, text: str, in_loop: bool, is_asked: bool) -> None:
    history = begun(tmp_path)
    if in_loop:
        history.training_begins(5)
    history.ended(None, code, text)
    assert [attempt.was_requested for attempt in read_attempts(tmp_path, RUN)] == [is_asked]


def test_the_first_end_counts_whichever_thread_writes_it(tmp_path: Path) -> None:
    history = begun(tmp_path)
    watchdog = threading.Thread(target=history.ended, args=(None, ExitCode.HANG, "rank 1 hangs"))
    history.training_begins(5)
    with pytest.raises(RuntimeError), history.recording():
        watchdog.start()
        watchdog.join()
        raise RuntimeError("later")
    assert [attempt.code for attempt in read_attempts(tmp_path, RUN)] == [76]
    assert [line["event"] for line in lines(tmp_path)].count("end") == 1


def test_an_end_in_another_thread_arrives_through_the_log(tmp_path: Path) -> None:
    """`process_exit.end_process` leaves by os._exit, past every handler."""
    history = begun(tmp_path)
    history.training_begins(9)
    with history.recording():
        told = list(process_exit._ENDING.listeners)
        assert [listener(ExitCode.HANG, "rank 1 hangs") for listener in told][-1] is False
    assert [(a.step, a.code) for a in read_attempts(tmp_path, RUN)] == [(9, 76)]
    assert len(process_exit._ENDING.listeners) == len(told) - 1


def test_the_step_of_a_killed_start_is_found(tmp_path: Path) -> None:
    train(begun(tmp_path), 5, 6)  # and no end
    (attempt,) = RestartHistory().open(tmp_path, RUN)
    assert (attempt.step, attempt.code, attempt.was_requested) == (6, None, False)
    assert "ended at iteration 6, killed without a message" in str(attempt)
    assert RestartHistory().open(tmp_path, RUN) == [attempt], "its end was written down"


def test_a_step_file_of_another_start_is_not_believed(tmp_path: Path) -> None:
    train(begun(tmp_path), 5, 6)
    (tmp_path / STEP_NAME).write_text("ffffffffffffffff 9".ljust(39) + "\n")
    assert [attempt.step for attempt in RestartHistory().open(tmp_path, RUN)] == [None]
    train(begun(tmp_path), 5, 6)
    (tmp_path / STEP_NAME).write_text("6")
    assert [attempt.step for attempt in RestartHistory().open(tmp_path, RUN)] == [None, None]


def test_torn_and_foreign_lines_are_passed_over(tmp_path: Path) -> None:
    begun(tmp_path).ended(7, 77, "loss nan")
    path = tmp_path / HISTORY_NAME
    whole = read_attempts(tmp_path, RUN)
    strange = [b"[1]", b"\xff\x00", b"[" * 100_000, b'{"run_id": "%s"}' % RUN.encode(), b'{"run_id": 3}']
    strange += [
        json.dumps({"run_id": RUN, "start": "b", "event": "start", "resumed_step": -1, "passes": []}).encode(),
        json.dumps({"run_id": RUN, "start": "c", "event": "end", "step": 3}).encode(),
        json.dumps({"run_id": RUN, "start": ["d"], "event": "start", "resumed_step": 1, "passes": []}).encode(),
    ]
    with path.open("ab") as file:
        file.write(b"\n".join(strange) + b'\n{"event": "start", "run_')
    assert read_attempts(tmp_path, RUN) == whole
    begun(tmp_path).ended(8, 1, "other")
    assert [attempt.step for attempt in read_attempts(tmp_path, RUN)] == [7, 8]


def test_only_the_end_of_a_long_history_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(20):
        begun(tmp_path, step).ended(step + 1, 1, "broken")
    monkeypatch.setattr(history_module, "_TAIL_BYTES", 2000)
    read = [attempt.resumed_step for attempt in read_attempts(tmp_path, RUN)]
    assert read == list(range(20 - len(read), 20)) and 2 < len(read) < 10


def test_a_history_that_cannot_be_written_or_read_ends_no_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / HISTORY_NAME)
    (tmp_path / STEP_NAME).mkdir()
    history = begun(tmp_path)
    train(history, 5, 6)
    history.ended(6, 1, "broken")
    text = capsys.readouterr().err
    assert f"{tmp_path / HISTORY_NAME} cannot be read" in text
    assert text.count("cannot be written") == 1, "once"


def test_a_history_that_was_not_opened_keeps_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    history = RestartHistory()
    history.started(0, "", (), "0.1")
    with history.recording():
        train(history, 1)
    history.ended(1, 1, "broken")
    assert list(tmp_path.iterdir()) == []


def test_the_starts_of_another_run_do_not_count(tmp_path: Path) -> None:
    begun(tmp_path, run_id="f" * 16).ended(7, 77, "loss nan")
    assert read_attempts(tmp_path, RUN) == []
    assert RestartHistory().open(tmp_path, RUN) == []


def test_text_that_a_terminal_would_obey_is_not_kept(tmp_path: Path) -> None:
    begun(tmp_path).ended(7, 1, "\x1b[2Jgone" + "x" * 1000)
    (attempt,) = read_attempts(tmp_path, RUN)
    assert attempt.text.startswith("?[2Jgonexxx") and len(attempt.text) == 300
