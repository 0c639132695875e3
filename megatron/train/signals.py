"""Stop signals: recorded for the training loop; they end the process if no further step can be completed."""

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
_GRACE_SECONDS = 2.0
_POLL_SECONDS = 0.2
_END_OF_THREAD = 0


class SignalTarget(Protocol):
    """The state of this rank that decides whether to wait for the end of the current step."""

    def peers_answer(self) -> bool:
        """True if every other rank has responded recently."""

    def seconds_without_progress(self) -> float:
        """Seconds since this rank last made progress."""

    def longest_seconds(self) -> float:
        """The longest interval without progress so far."""

    def is_saving(self) -> bool:
        """True while a checkpoint is being written, by the main thread or in the background."""


class StopSignals:
    """Handles SIGTERM and SIGUSR1.

    In the training loop the signal is only recorded, and the loop stops after the step. Elsewhere, at start-up and in
    the final evaluation, waiting would save nothing, so the process exits; it also exits if the loop is stuck, because
    another rank does not respond or the step takes several times longer than any before. A save in progress is always
    waited for.

    Python runs signal handlers between bytecodes of the main thread, which a rank that waits in a collective does not
    reach. So a thread reads signal numbers from a pipe that the interpreter writes to (`signal.set_wakeup_fd`). Call
    `install` and `restore` in the main thread.

    Args:
        end: ends the process from the thread: `process_exit.end_process` except in tests.
    """

    def __init__(self, end: Callable[[int, str], object] = process_exit.end_process) -> None:
        self._end = end
        self._received: int | None = None
        self._former: dict[int, Any] = {}
        self._target: SignalTarget | None = None
        self._in_loop = False
        self._settled = False
        self._pipe: tuple[int, int] | None = None
        self._former_wakeup = -1
        self._thread: threading.Thread | None = None

    @property
    def received(self) -> str | None:
        """Name of the first stop signal; None if there was none."""
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
        """Restores the previous signal handlers, and ends the thread."""
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
    def steps_follow(self, target: SignalTarget | None = None) -> Iterator[None]:
        """While the context is open, signals are left to the training loop, which reads `received`.

        Args:
            target: reports whether the loop makes progress; by default it is assumed to.
        """
        self._target, self._in_loop = target, True
        try:
            yield
        finally:
            self._in_loop = False

    def settle(self) -> None:
        """Ignores signals from now on, since the run is stopping anyway."""
        self._settled = True

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._received is None:
            self._received = number

    def _listen(self, reader: int) -> None:
        """Waits for signals; after the first one, checks whether the step can still be completed."""
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
                    self._end(ExitCode.REQUEUE, f"terminated by {self.received}: {reason}")
                    return

    def _obstacle(self, waited_seconds: float) -> str | None:
        """The reason not to wait for the end of the step or of a save; None while waiting is useful."""
        is_saving = self._target is not None and self._target.is_saving()
        if not self._in_loop and not is_saving:
            return "no step was in progress, so nothing is lost. Run the same command again."
        if self._target is None or waited_seconds < _GRACE_SECONDS:
            return None
        if not self._target.peers_answer():
            return (
                "another rank does not respond, so the current step cannot be completed. Saved checkpoints are intact; "
                "run the same command again."
            )
        if is_saving:
            return None  # limited by --hang-timeout-seconds only
        stuck_seconds, usual_seconds = self._target.seconds_without_progress(), self._target.longest_seconds()
        if stuck_seconds > max(_GRACE_SECONDS, 3.0 * usual_seconds):
            return (
                f"the current step has made no progress for {stuck_seconds:.0f} s, three times longer than ever "
                "before. Saved checkpoints are intact; run the same command again."
            )
        return None
