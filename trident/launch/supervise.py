"""Supervises the processes of a run: forwards signals, and terminates all processes when one fails."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron import log
from megatron.errors import ExitCode

# SIGHUP: the terminal or the connection was closed.
_FORWARDED = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGHUP: signal.SIGTERM}
_POLL_SECONDS = 0.1  # Python handles a signal that arrives just before a wait only at the end of the wait
_FIRST_SIGNAL_CODE = 128  # a shell, ssh and srun exit with this plus the signal that terminated the process


@dataclass(frozen=True)
class Child:
    """A process of the run.

    Attributes:
        name: for messages.
        send: sends it a signal, locally or over its connection.
    """

    name: str
    process: subprocess.Popen[bytes]
    send: Callable[[signal.Signals], None]


@dataclass(frozen=True)
class GracePeriods:
    """Time that processes have to exit.

    Attributes:
        settle_seconds: from the first failure to SIGTERM, so that the others can report it too.
        grace_seconds: from SIGTERM to SIGKILL.
    """

    settle_seconds: float = 10.0
    grace_seconds: float = 30.0


class Supervisor:
    """Waits for processes, forwards signals to them, and terminates all of them when one fails.

    SIGTERM, SIGUSR1 and the first Ctrl-C (as SIGTERM) are forwarded without a time limit: the processes may be saving.
    A second Ctrl-C kills them. After a forwarded signal, exit code 75 is not a failure.
    """

    def __init__(self, grace_periods: GracePeriods) -> None:
        self._periods = grace_periods
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[int, Child] = {}
        self._codes: list[int] = []
        self._due: list[tuple[float, signal.Signals]] = []  # times and signals, soonest first
        self._interrupts = 0
        self._is_stopping = False

    def forward(self, number: signal.Signals) -> None:
        """Sends a signal to all processes, from any thread."""
        self._events.put(lambda: self._send(number))

    def terminate(self) -> None:
        """Sends SIGTERM, and SIGKILL after the grace period, to all processes, from any thread."""
        self._events.put(lambda: self._schedule_termination(0.0))

    def run(self, children: Sequence[Child]) -> int:
        """Waits until all processes have exited; returns the exit code of the run, see `combined_code`."""
        self._running = dict(enumerate(children))
        for number in self._running:
            threading.Thread(target=self._wait_for, args=(number,), daemon=True).start()
        with self._handlers():
            while self._running:
                with suppress(queue.Empty):
                    self._events.get(timeout=_POLL_SECONDS)()
                if self._due and self._due[0][0] <= time.monotonic():
                    self._send(self._due.pop(0)[1])
        return combined_code(self._codes)

    def _wait_for(self, number: int) -> None:
        code = self._running[number].process.wait()
        self._events.put(lambda: self._handle_exit(number, code))

    def _handle_exit(self, number: int, code: int) -> None:
        child = self._running.pop(number)
        self._codes.append(code)
        has_saved = self._is_stopping and code == ExitCode.REQUEUE
        if code and not has_saved and self._running and not self._due:
            cause = f"was terminated by {signal.Signals(-code).name}" if code < 0 else f"exited with code {code}"
            log.warning(f"{child.name} {cause}; the others are being stopped")
            self._schedule_termination(self._periods.settle_seconds)

    def _schedule_termination(self, seconds: float) -> None:
        terminate_at = time.monotonic() + seconds
        self._due = [(terminate_at, signal.SIGTERM), (terminate_at + self._periods.grace_seconds, signal.SIGKILL)]

    def _send(self, number: signal.Signals) -> None:
        self._is_stopping = True
        for child in self._running.values():
            child.send(number)

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            log.info("stopping: the ranks finish their step and save; Ctrl-C again kills them")
        self._send(signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._events.put(self._interrupt)
        else:
            self.forward(_FORWARDED[signal.Signals(number)])

    @contextmanager
    def _handlers(self) -> Iterator[None]:
        numbers = signal.SIGINT, *_FORWARDED
        previous: dict[int, Any] = {number: signal.signal(number, self._handle_signal) for number in numbers}
        try:
            yield
        finally:
            for number, action in previous.items():
                signal.signal(number, action)


def combined_code(codes: Iterable[int]) -> int:
    """The exit code of a run, from the codes of its processes in order of exit.

    The earliest code that names a cause wins: 77 of the rank with a NaN over 75 of the ranks that lost it. Otherwise it
    is 75 (resumable) if any process exited with it, as the others do when one is killed; otherwise 128 plus the signal
    that terminated the first.

    Args:
        codes: negative for a signal, as in `subprocess`.
    """
    failed = [_FIRST_SIGNAL_CODE - code if code < 0 else code for code in codes if code != ExitCode.DONE]
    causes = [code for code in failed if code < _FIRST_SIGNAL_CODE and code != ExitCode.REQUEUE]
    if causes:
        return causes[0]
    if ExitCode.REQUEUE in failed:
        return ExitCode.REQUEUE
    return failed[0] if failed else ExitCode.DONE
