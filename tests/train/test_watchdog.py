"""What a rank says of its place, and what a watch of one process does."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from megatron import log
from megatron.parallel.watch.verdict import RunEnd
from megatron.train import watchdog
from megatron.train.watchdog import Watch


def test_a_phase_is_progress_and_keeps_the_step() -> None:
    watch = Watch()
    time.sleep(0.02)
    assert watch.seconds_without_progress() >= 0.02
    entered_at = time.monotonic()
    watch.enter("data", 3)
    assert watch._position.at_seconds >= entered_at
    assert watch.longest_seconds() == 0  # start-up is not compared with
    time.sleep(0.02)
    watch.enter("forward")
    assert watch.longest_seconds() >= 0.02
    before = watch._position
    watch.beat()
    after = watch._position
    assert (after.phase, after.step, after.events) == ("forward", 3, before.events + 1)
    assert after.at_seconds >= before.at_seconds


def test_a_single_process_has_no_peers_to_notify() -> None:
    with Watch() as watch:
        assert watch.peers_answer()
        assert not watch.fail(1, "shown by the caller")


def test_only_the_phase_that_is_meant_makes_progress() -> None:
    watch = Watch()
    watch.enter("forward", 3)
    events = watch.position().events
    watch.beat("save")
    assert watch.position().events == events
    watch.enter("save")
    watch.beat("save")
    assert watch.position().events == events + 2


def test_start_up_ends_with_the_first_step() -> None:
    watch = Watch()
    seen = []
    for phase in ("data", "forward", "backward", "step", "data"):
        watch.enter(phase)
        seen.append(watch.is_starting())
    assert seen == [True, True, True, True, False]
    evaluates = Watch()
    evaluates.enter("evaluation", 5)
    assert not evaluates.is_starting()


def test_stacks_go_to_a_new_file_where_there_is_a_folder(tmp_path: Path) -> None:
    watch = Watch()
    assert watch._write_stacks("nowhere to go") is None
    watch.report_folder = tmp_path / "missing"
    assert watch._write_stacks("nowhere to go") is None
    watch.report_folder = tmp_path
    assert watch._write_stacks("first") == tmp_path / "hang-1.txt"
    assert watch._write_stacks("second") == tmp_path / "hang-2.txt"
    assert (tmp_path / "hang-1.txt").read_text() == "first\n"


def test_a_folder_that_hangs_does_not_hold_up_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch()
    watch.report_folder = tmp_path
    released = threading.Event()
    monkeypatch.setattr(Path, "is_dir", lambda path: released.wait(120))
    monkeypatch.setattr(watchdog, "_FILE_SECONDS", 0.1)
    assert watch._write_stacks("never written") is None
    released.set()


def test_a_verdict_is_shown_with_its_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Watch, "_end_later", lambda watch, code: None)
    monkeypatch.setattr(log._OUTPUT, "rank", 0)
    watch = Watch()
    watch.report_folder = tmp_path
    watch.show(RunEnd(76, 3, "rank 3 hangs", stacks="stacks of all"))
    shown = capsys.readouterr().err
    assert shown == f"[rank 3] error: rank 3 hangs\nThe stacks of all ranks are in {tmp_path}/hang-1.txt.\n"
    watch.show(RunEnd(65, 2, "bad data"))
    assert capsys.readouterr().err == "[rank 2] error: bad data\n"
