"""One writer per directory: a live holder keeps the lock, a dead one is replaced, and a lost lock is detected."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

from megatron.checkpoint import CheckpointLock, SaveOptions, save
from megatron.checkpoint.lock import LOCK_NAME, Holder
from megatron.errors import CheckpointError, LaunchError, StorageError
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.pieces import PieceKey

MESH = ParallelMesh.single()
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


def lock(directory: Path, stale_seconds: float = 0.4) -> CheckpointLock:
    return CheckpointLock(directory, MESH, heartbeat_seconds=0.05, stale_seconds=stale_seconds)


@contextmanager
def holding_process(directory: Path, with_child: bool = False) -> Iterator[int]:
    """Another process that holds the lock, and if asked a child of it that outlives it with the file still open."""
    said, saying = os.pipe()
    stop, stopping = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        os.close(stopping)
        lock(directory).acquire()
        if with_child and os.fork() == 0:
            os.read(stop, 1)
            os._exit(0)
        os.write(saying, b"x")
        while True:
            time.sleep(1)
    try:
        assert os.read(said, 1) == b"x"
        yield process_id
    finally:
        os.close(stopping)
        kill(process_id)


def kill(process_id: int) -> None:
    try:
        os.kill(process_id, signal.SIGKILL)
        os.waitpid(process_id, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def write_holder(directory: Path, holder: Holder) -> None:
    text = json.dumps(asdict(holder)).ljust(1023) + "\n"
    with (directory / LOCK_NAME).open("r+" if (directory / LOCK_NAME).exists() else "w") as file:
        file.write(text)


def elsewhere() -> Holder:
    return replace(Holder.this_process(), host="node7", machine="another kernel")


def no_flock(*_: object) -> None:
    raise OSError(errno.ENOLCK, "No locks available")


def test_a_live_holder_keeps_the_lock_and_is_named(tmp_path: Path) -> None:
    with (
        holding_process(tmp_path) as process_id,
        pytest.raises(LaunchError, match=rf"{tmp_path} is in use by run \w+ \(process {process_id} on host .*--save"),
    ):
        lock(tmp_path).acquire()


def test_the_same_process_cannot_acquire_it_twice(tmp_path: Path) -> None:
    with lock(tmp_path), pytest.raises(LaunchError, match=f"process {os.getpid()}"):
        lock(tmp_path).acquire()
    with lock(tmp_path):
        assert (tmp_path / LOCK_NAME).exists()
    assert not (tmp_path / LOCK_NAME).exists()


def test_the_lock_of_a_killed_holder_is_taken_over_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with holding_process(tmp_path) as process_id:
        kill(process_id)
        began = time.monotonic()
        with lock(tmp_path, stale_seconds=600) as held:
            held.check()
        assert time.monotonic() - began < 120
    assert f"process {process_id} on host" in capsys.readouterr().err


def test_a_child_that_outlives_the_holder_does_not_keep_the_lock(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with holding_process(tmp_path, with_child=True) as process_id:
        kill(process_id)
        with lock(tmp_path, stale_seconds=30) as held:
            held.check()
            with pytest.raises(LaunchError, match=f"process {os.getpid()}"):
                lock(tmp_path).acquire()
    assert "whose process is gone" in capsys.readouterr().err


def test_a_stalled_remote_holder_is_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_holder(tmp_path, elsewhere())
    began = time.monotonic()
    with lock(tmp_path) as held:
        assert time.monotonic() - began >= 0.4
        held.check()
    assert "on host node7), which sent no heartbeat" in capsys.readouterr().err


def beating(directory: Path, holder: Holder, stop: threading.Event) -> None:
    for counter in itertools.count(1):
        write_holder(directory, replace(holder, counter=counter))
        if stop.wait(0.02):
            return


def test_a_remote_holder_with_a_rising_counter_keeps_the_lock(tmp_path: Path) -> None:
    holder = elsewhere()
    write_holder(tmp_path, holder)
    stop = threading.Event()
    thread = threading.Thread(target=beating, args=(tmp_path, holder, stop))
    thread.start()
    try:
        with pytest.raises(LaunchError, match="on host node7"):
            lock(tmp_path, stale_seconds=60).acquire()
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("ending", ["released", "removed"])
def test_waiting_ends_when_the_holder_releases_the_lock(tmp_path: Path, ending: str) -> None:
    holder = elsewhere()
    write_holder(tmp_path, holder)

    def let_go() -> None:
        if ending == "released":
            write_holder(tmp_path, replace(holder, released=True))
        else:
            (tmp_path / LOCK_NAME).unlink()

    timer = threading.Timer(0.1, let_go)
    timer.start()
    began = time.monotonic()
    with lock(tmp_path, stale_seconds=600):
        assert time.monotonic() - began < 120
    timer.join()


def test_without_kernel_locks_the_process_id_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_flock)
    monkeypatch.setattr("megatron.checkpoint.lock._SETTLE_SECONDS", 0.05)
    with holding_process(tmp_path) as process_id:
        with pytest.raises(LaunchError, match=f"process {process_id}"):
            lock(tmp_path, stale_seconds=30).acquire()
        kill(process_id)
        with lock(tmp_path, stale_seconds=30):
            pass
    assert "whose process is gone" in capsys.readouterr().err


def test_without_kernel_locks_the_later_of_two_acquires_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", no_flock)
    monkeypatch.setattr("megatron.checkpoint.lock._SETTLE_SECONDS", 0.0)
    sleep = time.sleep

    def another_acquires_it(seconds: float) -> None:
        if seconds == 0.0:  # after this process has written its name
            write_holder(tmp_path, elsewhere())
        sleep(seconds)

    monkeypatch.setattr(time, "sleep", another_acquires_it)
    with pytest.raises(LaunchError, match="on host node7"):
        lock(tmp_path).acquire()


def test_a_reused_process_id_is_not_mistaken_for_the_holder(tmp_path: Path) -> None:
    write_holder(tmp_path, replace(Holder.this_process(), born="1"))
    with lock(tmp_path, stale_seconds=30):
        pass


@pytest.mark.parametrize("content", [b"", b"\0" * 1024, b"[1]", b'{"run": 1}', b"[" * 1024])
def test_a_lock_file_without_a_holder_is_taken_over(tmp_path: Path, content: bytes) -> None:
    (tmp_path / LOCK_NAME).write_bytes(content)
    with lock(tmp_path, stale_seconds=30) as held:
        held.check()


@pytest.mark.parametrize("how", ["taken", "removed"])
def test_a_lost_lock_is_detected_and_nothing_is_published(
    tmp_path: Path, how: str, capsys: pytest.CaptureFixture[str]
) -> None:
    def take_away() -> None:
        (tmp_path / LOCK_NAME).unlink()
        if how == "taken":
            write_holder(tmp_path, elsewhere())

    text = "on host node7" if how == "taken" else "no longer held by this job"
    pieces = [(PieceKey("a", "weight", (4,), (0,), (4,), 0, 4), torch.zeros(4))]
    held = lock(tmp_path)
    held.acquire()
    take_away()
    with pytest.raises(CheckpointError, match=text):
        save(tmp_path, 1, pieces, {}, MESH, SaveOptions(lock=held))
    assert not list(tmp_path.glob("iter_*"))
    assert not list(tmp_path.glob(".tmp-*"))
    shown, deadline = "", time.monotonic() + 120
    while text not in shown and time.monotonic() < deadline:  # printed with a heartbeat
        time.sleep(0.01)
        shown += capsys.readouterr().err
    assert text in shown
    held.release()
    assert (tmp_path / LOCK_NAME).exists() == (how == "taken")


def test_a_directory_that_is_deleted_during_a_run_is_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with lock(folder) as held:
        for step in (1, 2):
            pieces = [(PieceKey("a", "weight", (4,), (0,), (4,), 0, 4), torch.zeros(4))]
            save(folder, step, pieces, {}, MESH, SaveOptions(lock=held))
            if step == 1:
                shutil.rmtree(folder)
        assert [path.name for path in folder.glob("iter_*")] == ["iter_0000002"]
        assert capsys.readouterr().err.count(f"{folder} was deleted during the run; it is recreated") == 1
        with pytest.raises(LaunchError, match=f"run is in use by run .*process {os.getpid()}"):
            lock(folder).acquire()
    assert not (folder / LOCK_NAME).exists()


def test_a_symlink_at_the_path_and_a_file_in_place_of_the_directory_are_refused(tmp_path: Path) -> None:
    (tmp_path / LOCK_NAME).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StorageError, match="ELOOP"):
        lock(tmp_path).acquire()
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot lock .*file/.run.lock: .*The directory must be writable for this"):
        lock(tmp_path / "file").acquire()


def test_the_heartbeat_counter_increases(tmp_path: Path) -> None:
    with lock(tmp_path):
        deadline = time.monotonic() + 120
        while json.loads((tmp_path / LOCK_NAME).read_text())["counter"] < 3:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_a_file_system_error_is_not_a_lost_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(_: Path) -> Holder:
        raise OSError(errno.ESTALE, "Stale file handle")

    check: Callable[[], None]
    with lock(tmp_path) as held:
        monkeypatch.setattr("megatron.checkpoint.lock._read_path", broken)
        check = held.check
        check()
    assert "cannot check the lock" in capsys.readouterr().err
