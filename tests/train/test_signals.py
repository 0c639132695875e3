"""Stop signals: left to the loop while it trains, the end of the process elsewhere."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from megatron.errors import ExitCode
from megatron.train import signals as module
from megatron.train.signals import StopSignals


class Ends:
    """Notes how a process would have been ended."""

    def __init__(self) -> None:
        self.seen: queue.Queue[tuple[int, str]] = queue.Queue()

    def __call__(self, code: int, text: str) -> None:
        self.seen.put((code, text))


class State:
    """What is known of the other ranks and the step; set by hand."""

    def __init__(self, answer: bool = True, stuck: float = 0.0, longest: float = 0.0, saving: bool = False) -> None:
        self.answer, self.stuck, self.longest, self.saving = answer, stuck, longest, saving

    def peers_answer(self) -> bool:
        return self.answer

    def seconds_without_progress(self) -> float:
        return self.stuck

    def longest_seconds(self) -> float:
        return self.longest

    def is_saving(self) -> bool:
        return self.saving


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_GRACE_SECONDS", 0.3)
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.02)


@pytest.fixture
def ends() -> Iterator[Ends]:
    yield Ends()


def test_handlers_threads_and_pipes_are_taken_out_again() -> None:
    former = {number: signal.getsignal(number) for number in module.STOP_SIGNALS}
    threads, wakeup = threading.active_count(), signal.set_wakeup_fd(-1)
    signal.set_wakeup_fd(wakeup)
    installed = StopSignals().install().install()
    assert signal.getsignal(signal.SIGTERM) not in former.values()
    installed.restore()
    installed.restore()
    assert {number: signal.getsignal(number) for number in former} == former
    assert (threading.active_count(), signal.set_wakeup_fd(wakeup)) == (threads, wakeup)


def test_before_the_first_step_a_signal_ends_the_process(ends: Ends) -> None:
    with StopSignals(ends).installed():
        os.kill(os.getpid(), signal.SIGUSR1)
        code, text = ends.seen.get(timeout=120)
    assert code == ExitCode.REQUEUE
    assert text.startswith("terminated by SIGUSR1: no step was in progress")


def test_in_the_loop_a_signal_is_noted_and_nothing_ends(ends: Ends, quick: None) -> None:
    with StopSignals(ends).installed() as signals, signals.steps_follow(State(longest=10.0, stuck=20.0)):
        os.kill(os.getpid(), signal.SIGTERM)
        ends_at = time.monotonic() + 120
        while signals.received is None:
            assert time.monotonic() < ends_at
            time.sleep(0.01)
        assert signals.received == "SIGTERM"
        time.sleep(0.6)
        signals.settle()
    time.sleep(0.1)
    assert ends.seen.empty()


@pytest.mark.parametrize(
    ("state", "reason"),
    [
        (State(answer=False), "another rank does not respond"),
        (State(answer=False, saving=True), "another rank does not respond"),
        (State(stuck=31.0, longest=10.0), "the current step has made no progress for 31 s"),
    ],
)
def test_a_loop_that_is_stuck_ends_with_the_signal(ends: Ends, quick: None, state: State, reason: str) -> None:
    with StopSignals(ends).installed() as signals, signals.steps_follow(state):
        os.kill(os.getpid(), signal.SIGTERM)
        code, text = ends.seen.get(timeout=120)
    assert (code, reason in text) == (ExitCode.REQUEUE, True)


@pytest.mark.parametrize("in_loop", [True, False], ids=["in the loop", "after it"])
def test_a_save_that_is_being_written_is_waited_for(ends: Ends, quick: None, in_loop: bool) -> None:
    state = State(stuck=31.0, longest=10.0, saving=True)
    with StopSignals(ends).installed() as signals:
        with signals.steps_follow(state):
            if in_loop:
                os.kill(os.getpid(), signal.SIGUSR1)
                time.sleep(0.6)
                assert ends.seen.empty()
        if not in_loop:
            os.kill(os.getpid(), signal.SIGUSR1)
        time.sleep(0.6)
        assert ends.seen.empty()
        state.saving = False
        assert ends.seen.get(timeout=120)[0] == ExitCode.REQUEUE


def test_a_signal_reaches_a_process_whose_main_thread_is_stuck_outside_python() -> None:
    """Python's own handlers wait for the main thread's next bytecode, which a collective never lets it reach."""
    program = (
        "import ctypes\n"
        "from megatron.train.signals import StopSignals\n"
        "with StopSignals().installed():\n"
        "    print('ready', flush=True)\n"
        "    libc = ctypes.CDLL(None)\n"
        "    mask = ctypes.create_string_buffer(128)\n"
        "    libc.sigfillset(mask)\n"
        "    libc.pthread_sigmask(0, mask, None)  # another thread takes the signal\n"
        "    libc.sleep(3600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        _, text = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == ExitCode.REQUEUE, text
    assert "terminated by SIGTERM" in text
