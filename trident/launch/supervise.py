"""Watches the processes of a run: passes signals on, and ends all of them when one fails."""

from __future__ import annotations

import queue
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from megatron import log
from megatron.errors import ExitCode

# SIGHUP: the terminal or the connection is gone.
_PASSED_ON = {signal.SIGTERM: signal.SIGTERM, signal.SIGUSR1: signal.SIGUSR1, signal.SIGHUP: signal.SIGTERM}


_FIRST_SIGNAL_CODE = 128  # what a shell, ssh and srun make of an end by a signal


@dataclass(frozen=True)
class Child:
    """A process of the run.

    Attributes:
        name: as messages call it.
        send: sends it a signal, in whatever way it is reached.
    """

    name: str
    process: subprocess.Popen[bytes]
    send: Callable[[signal.Signals], None]


@dataclass(frozen=True)
class Patience:
    """How long processes have to end.

    Attributes:
        settle_seconds: from the first failure, so that each can say what it saw of it, until SIGTERM.
        grace_seconds: from SIGTERM until SIGKILL.
    """

    settle_seconds: float = 10.0
    grace_seconds: float = 30.0


class Supervisor:
    """Waits for processes, and for what may end them early.

    SIGTERM, SIGUSR1 and the first Ctrl-C are passed on (the latter as SIGTERM), and the processes then have all the
    time they need: they may be saving. A second Ctrl-C kills them. A failure of one, or `abandon`, ends the others; a
    process that was asked to stop and ends with 75 has obeyed.
    """

    def __init__(self, patience: Patience) -> None:
        self._patience = patience
        self._events: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._running: dict[int, Child] = {}
        self._codes: list[int] = []
        self._due: list[tuple[float, signal.Signals]] = []  # what is sent when, soonest first
        self._interrupts = 0
        self._is_asked_to_stop = False

    def pass_on(self, number: signal.Signals) -> None:
        """Sends a signal to all processes, from any thread."""
        self._events.put(lambda: self._send(number))

    def abandon(self) -> None:
        """Ends all processes, from any thread: with SIGTERM, and SIGKILL after the grace period."""
        self._events.put(lambda: self._end_all(0.0))

    def run(self, children: Sequence[Child]) -> int:
        """Waits until all processes have ended.

        Returns:
            the exit code of the run, see `combined_code`.
        """
        self._running = dict(enumerate(children))
        for number in self._running:
            threading.Thread(target=self._wait_for, args=(number,), daemon=True).start()
        with self._handlers():
            while self._running:
                try:
                    self._events.get(timeout=max(0.0, self._due[0][0] - time.monotonic()) if self._due else None)()
                except queue.Empty:
                    self._send(self._due.pop(0)[1])
        return combined_code(self._codes)

    def _wait_for(self, number: int) -> None:
        code = self._running[number].process.wait()
        self._events.put(lambda: self._ended(number, code))

    def _ended(self, number: int, code: int) -> None:
        child = self._running.pop(number)
        self._codes.append(code)
        is_saved = self._is_asked_to_stop and code == ExitCode.REQUEUE
        if code and not is_saved and self._running and not self._due:
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            log.warning(f"{child.name} ended {how}; the others are being stopped")
            self._end_all(self._patience.settle_seconds)

    def _end_all(self, seconds: float) -> None:
        """Has SIGTERM sent after this many seconds, and SIGKILL after the grace period."""
        at = time.monotonic() + seconds
        self._due = [(at, signal.SIGTERM), (at + self._patience.grace_seconds, signal.SIGKILL)]

    def _send(self, number: signal.Signals) -> None:
        self._is_asked_to_stop = True
        for child in self._running.values():
            child.send(number)

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1:
            log.info("stopping: the ranks finish their step and save; Ctrl-C again kills them")
        self._send(signal.SIGTERM if self._interrupts == 1 else signal.SIGKILL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            self._events.put(self._interrupt)
        else:
            self.pass_on(_PASSED_ON[signal.Signals(number)])

    @contextmanager
    def _handlers(self) -> Iterator[None]:
        former: dict[int, Any] = {number: signal.signal(number, self._note) for number in (signal.SIGINT, *_PASSED_ON)}
        try:
            yield
        finally:
            for number, before in former.items():
                signal.signal(number, before)


def combined_code(codes: Iterable[int]) -> int:
    """The exit code that says why a run ended, from its processes' codes in the order in which they ended.

    A code that names a cause wins, the earliest first: 77 of the rank with a NaN over the 75 of the ranks that lost it.
    If there is none and a process says that the run can be started again (75), as the others do when one is killed, so
    does the run. Else it is 128 plus the signal that ended the first.

    Args:
        codes: negative for a signal, as `subprocess` has it.
    """
    failed = [_FIRST_SIGNAL_CODE - code if code < 0 else code for code in codes if code != ExitCode.DONE]
    causes = [code for code in failed if code < _FIRST_SIGNAL_CODE and code != ExitCode.REQUEUE]
    if causes:
        return causes[0]
    if ExitCode.REQUEUE in failed:
        return ExitCode.REQUEUE
    return failed[0] if failed else ExitCode.DONE
