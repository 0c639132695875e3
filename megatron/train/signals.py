"""Stop signals: noted for the training loop, or the end of the process where no other step can be reached."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, Protocol

from megatron import process_exit
from megatron.errors import ExitCode

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1)

# A scheduler that sends SIGTERM usually sends SIGKILL half a minute later.
_PATIENCE_SECONDS = 2.0
_POLL_SECONDS = 0.2
_END_OF_THREAD = 0


class SignalTarget(Protocol):
    """What is known about whether this rank will reach the end of the current step."""

    def peers_answer(self) -> bool:
        """Whether every other rank has shown a sign of life recently."""

    def seconds_without_progress(self) -> float:
        """How long this rank has made no progress."""

    def longest_seconds(self) -> float:
        """The longest time this rank has gone without progress before making some again."""

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written, by the main thread or in the background."""


class StopSignals:
    """Notes that SIGTERM or SIGUSR1 has arrived.

    In the training loop that is all, and the loop stops after the step. Elsewhere, in start-up and in the evaluation at
    the end of a run, nothing would be saved by waiting, so the process ends; it also ends if the loop is stuck, because
    another rank does not answer or the step takes several times longer than any before. A checkpoint that is being
    written is waited for in any case.

    Python runs signal handlers in the main thread and between two of its bytecodes, which a rank that waits in a
    collective does not reach. So a thread reads the numbers of arriving signals from a pipe that the interpreter fills
    (`signal.set_wakeup_fd`). Call `install` and `restore` in the main thread.

    Args:
        end: ends the process from the thread: `process_exit.end_process` except in tests.
    """

    def __init__(self, end: Callable[[int, str], object] = process_exit.end_process) -> None:
        self._end = end
        self._received: int | None = None
        self._former: dict[int, Any] = {}
        self._reach: SignalTarget | None = None
        self._in_loop = False
        self._settled = False
        self._pipe: tuple[int, int] | None = None
        self._former_wakeup = -1
        self._thread: threading.Thread | None = None

    @property
    def received(self) -> str | None:
        """Name of the first stop signal that arrived; None if there was none."""
        return None if self._received is None else signal.Signals(self._received).name

    @contextlib.contextmanager
    def installed(self) -> Iterator[StopSignals]:
        """Installs the handlers while the context is open."""
        try:
            yield self.install()
        finally:
            self.restore()

    def install(self) -> StopSignals:
        """Installs the signal handlers and starts the thread; idempotent."""
        if self._thread is None:
            reader, writer = self._pipe = os.pipe()
            os.set_blocking(writer, False)
            self._former_wakeup = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
            self._thread = threading.Thread(target=self._listen, args=(reader,), name="stop-signals", daemon=True)
            self._thread.start()
        for number in STOP_SIGNALS:
            if number not in self._former:
                self._former[number] = signal.signal(number, self._note)
        return self

    def restore(self) -> None:
        """Restores the signal handlers from before `install`, and ends the thread."""
        for number, former in self._former.items():
            signal.signal(number, signal.SIG_DFL if former is None else former)
        self._former = {}
        if self._thread is not None and self._pipe is not None:
            signal.set_wakeup_fd(self._former_wakeup)
            os.write(self._pipe[1], bytes([_END_OF_THREAD]))
            self._thread.join()
            for handle in self._pipe:
                os.close(handle)
            self._thread = self._pipe = None

    @contextlib.contextmanager
    def steps_follow(self, reach: SignalTarget | None = None) -> Iterator[None]:
        """While the context is open, a signal is left to the loop that trains, which asks for `received`.

        Args:
            reach: tells whether the loop still makes progress; None assumes that it does.
        """
        self._reach, self._in_loop = reach, True
        try:
            yield
        finally:
            self._in_loop = False

    def settle(self) -> None:
        """Notes that the run is stopping anyway: signals have no effect from here on."""
        self._settled = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number

    def _listen(self, reader: int) -> None:
        """Waits for signals; after the first one, checks whether a step can still be reached."""
        since: float | None = None
        while True:
            ready, _, _ = select.select([reader], [], [], None if since is None else _POLL_SECONDS)
            for number in os.read(reader, 256) if ready else b"":
                if number == _END_OF_THREAD:
                    return
                if number in STOP_SIGNALS:
                    self._note(number, None)
                    since = since or time.monotonic()
            if since is not None and not self._settled:
                reason = self._obstacle(time.monotonic() - since)
                if reason is not None:
                    self._end(ExitCode.REQUEUE, f"ended by {self.received}: {reason}")
                    return

    def _obstacle(self, waited_seconds: float) -> str | None:
        """Why neither another step nor a save is worth waiting for, or can be reached; None while one can."""
        is_saving = self._reach is not None and self._reach.is_saving()
        if not self._in_loop and not is_saving:
            return "no step was in progress, so nothing is lost. Run the same command again."
        if self._reach is None or waited_seconds < _PATIENCE_SECONDS:
            return None
        if not self._reach.peers_answer():
            return (
                "another rank does not answer, so the current step cannot be finished. Saved checkpoints are intact; "
                "run the same command again."
            )
        if is_saving:
            return None  # a file system may take its time; --hang-timeout-seconds says how much
        stuck_seconds, usual_seconds = self._reach.seconds_without_progress(), self._reach.longest_seconds()
        if stuck_seconds > max(_PATIENCE_SECONDS, 3.0 * usual_seconds):
            return (
                f"the current step has not moved for {stuck_seconds:.0f} s, three times longer than any part of a step "
                "before. Saved checkpoints are intact; run the same command again."
            )
        return None
