"""Supervised processes: signals reach them, and a failure terminates the others."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import pytest

from trident.launch.supervise import Child, GracePeriods, Supervisor, combined_code

WAITING = "import signal, sys, time; print(flush=True)"
STUBBORN = f"{WAITING}; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
GRACEFUL = (
    f"{WAITING}; signal.signal(signal.SIGTERM, lambda n, f: sys.exit(75)); "
    "signal.signal(signal.SIGUSR1, lambda n, f: sys.exit(74)); print(flush=True); time.sleep(60)"
)


def child(program: str, name: str = "one") -> Child:
    """A process that has installed its handlers."""
    process = subprocess.Popen([sys.executable, "-IS", "-c", program], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    process.stdout.readline()
    if "SIGTERM" in program:
        process.stdout.readline()
    return Child(name, process, process.send_signal)


def prompt_child(program: str, name: str = "one") -> Child:
    """One that has ended when its signal is sent, however slow the machine and short the grace period."""
    slow = child(program, name)

    def send(number: signal.Signals) -> None:
        slow.process.send_signal(number)
        slow.process.wait()

    return Child(name, slow.process, send)


def once_it_listens(act: Callable[[], None]) -> None:
    """Does something as soon as a supervisor has installed its handlers: before, a signal would end the tests."""
    former = signal.getsignal(signal.SIGHUP)  # installed last

    def wait() -> None:
        while signal.getsignal(signal.SIGHUP) is former:
            time.sleep(0.002)
        act()

    threading.Thread(target=wait, daemon=True).start()


def to_oneself(number: signal.Signals) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


def test_all_codes_are_waited_for() -> None:
    assert Supervisor(GracePeriods()).run([child("print()"), child("print()")]) == 0


def test_a_failure_ends_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    children = [child("print(flush=True); raise SystemExit(77)", "rank 1"), prompt_child(GRACEFUL), child(STUBBORN)]
    assert Supervisor(GracePeriods(0.1, 0.3)).run(children) == 77
    assert [one.process.returncode for one in children] == [77, 75, -signal.SIGKILL]
    assert "rank 1 exited with code 77; the others are being stopped" in capsys.readouterr().err


def test_a_killed_process_makes_the_run_one_to_start_again(capsys: pytest.CaptureFixture[str]) -> None:
    kill_oneself = "print(flush=True); import os; os.kill(os.getpid(), 9)"
    assert Supervisor(GracePeriods(0, 30)).run([child(kill_oneself), child(GRACEFUL)]) == 75
    assert "one was terminated by SIGKILL" in capsys.readouterr().err


def test_one_that_fails_while_it_stops_ends_the_others() -> None:
    failing = GRACEFUL.replace("sys.exit(75)", "sys.exit(1)")
    children = [prompt_child(failing), child(STUBBORN)]
    once_it_listens(to_oneself(signal.SIGINT))
    assert Supervisor(GracePeriods(0.1, 0.2)).run(children) in (1, 137)
    assert [one.process.returncode for one in children] == [1, -signal.SIGKILL]


def test_one_that_has_saved_leaves_the_others_their_time() -> None:
    slow = GRACEFUL.replace("sys.exit(75)", "(time.sleep(1), sys.exit(75))")
    once_it_listens(to_oneself(signal.SIGTERM))
    assert Supervisor(GracePeriods(0, 0)).run([child(GRACEFUL), child(slow)]) == 75


@pytest.mark.parametrize(
    ("signals", "code"),
    [((signal.SIGUSR1,), 74), ((signal.SIGTERM,), 75), ((signal.SIGINT,), 75), ((signal.SIGHUP,), 75)],
)
def test_signals_are_forwarded(signals: tuple[signal.Signals, ...], code: int) -> None:
    children = [child(GRACEFUL)]
    before = signal.getsignal(signal.SIGTERM)
    once_it_listens(to_oneself(signals[0]))
    assert Supervisor(GracePeriods(0, 0)).run(children) == code
    assert signal.getsignal(signal.SIGTERM) is before


def test_the_second_interrupt_kills(capsys: pytest.CaptureFixture[str]) -> None:
    children = [child(STUBBORN), child(STUBBORN)]

    def interrupt_twice() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        assert children[0].process.poll() is None
        os.kill(os.getpid(), signal.SIGINT)

    once_it_listens(interrupt_twice)
    assert Supervisor(GracePeriods(0, 30)).run(children) == 137
    assert "Ctrl-C again kills them" in capsys.readouterr().err


def test_terminated_processes_get_the_grace_period() -> None:
    supervisor, children = Supervisor(GracePeriods(30, 0.2)), [prompt_child(GRACEFUL), child(STUBBORN)]
    threading.Timer(0.1, supervisor.terminate).start()
    assert supervisor.run(children) == 75
    assert children[1].process.returncode == -signal.SIGKILL


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        ([0, 0], 0),
        ([], 0),
        ([77, 75, 75], 77),
        ([75, 77], 77),
        ([-9, 75, 75], 75),
        ([137, 75], 75),
        ([1, 75], 1),
        ([76, 77], 76),
        ([0, 78], 78),
        ([-11, -15], 139),
        ([143, -9], 143),
        ([255, 75], 75),
        ([255, 143], 255),
    ],
)
def test_the_cause_wins(codes: list[int], code: int) -> None:
    assert combined_code(codes) == code
