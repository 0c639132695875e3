"""The watchdog detects ranks that hang or exit.

If a rank makes no progress for `--hang-timeout-seconds`, the run ends with code 76 and a message that names the rank.
If a rank fails or exits silently, the run ends within seconds, and the first error is printed once.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, final

from megatron import log, process_exit
from megatron.errors import ExitCode
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.watch.channel import Channel
from megatron.parallel.watch.coordinator import Coordinator, Failure
from megatron.parallel.watch.coordinator_link import Link
from megatron.parallel.watch.limits import WatchLimits
from megatron.parallel.watch.opening import ConnectedRanks, connect_ranks
from megatron.parallel.watch.peers import Peers
from megatron.parallel.watch.position import END, START, Position, RankPace, first_position
from megatron.parallel.watch.verdict import RunEnd
from megatron.parallel.watch.wire import TEXT_CHARACTERS

# Shutdown may block, for example on a hung file system; then the process exits without it.
_LAST_SECONDS = 5.0
_FILE_SECONDS = 2.0
_THREAD_SECONDS = 1.0
# Additional time to wait for the message that ends this rank, after the time that others may take to close their files.
_GRACE_SECONDS = 10.0


@final
class Watch:
    """Reports the position of this rank, and its failure, to the other ranks; a context manager.

    Inactive until `open`. All methods except `open` and `enter` may be called from any thread.

    Attributes:
        report_folder: folder for the stacks of all ranks when the run hangs, if it exists.
        has_background_save: returns True while a checkpoint is being written in the background.
    """

    def __init__(self) -> None:
        self.report_folder: Path | None = None
        self.has_background_save: Callable[[], bool] = lambda: False
        self._position = first_position()
        self._longest_seconds = 0.0
        self._is_starting = True
        self._connected: ConnectedRanks | None = None
        self._channel: Channel | None = None
        self._closing_seconds = 0.0
        self._own_error = ""
        self._pace = RankPace()
        self._unregister: Callable[[], None] | None = None

    def open(self, mesh: ParallelMesh, rendezvous: tuple[str, int], limits: WatchLimits) -> None:
        """Connects the ranks and starts watching; collective over the mesh.

        Args:
            rendezvous: host and port of the rendezvous.
        """
        rank, size = mesh.world.rank, mesh.world.size
        if size == 1 and not limits.hang_seconds:
            return
        self._connected = connected = connect_ranks(mesh, rendezvous)
        if connected is None:
            return
        self._closing_seconds = limits.closing_seconds
        now, coordinator = time.monotonic(), None
        if rank in connected.coordinators:
            first = None if rank == 0 else 0
            coordinator = Coordinator(rank, first, connected.processes, connected.token, limits, now)
        relayed = None if connected.listener is None or coordinator is not None else Peers(connected.token, size, rank)
        is_relayed = bool(connected.fallback)
        links = [Link.open(one, address, rank, now, is_relayed=is_relayed) for address, one in connected.connected]
        self._channel = Channel(
            self,
            limits,
            links,
            coordinator,
            connected.listener,
            rank,
            size,
            relayed=relayed,
            coordinators=connected.fallback,
        )
        self._channel.start()
        if size > 1 and process_exit.is_program():
            self._unregister = process_exit.on_failure(self._on_failure)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._unregister is not None and isinstance(error, Exception | KeyboardInterrupt):
            self._leave_with(error)
            return
        self.enter(END)
        if self._unregister is not None:
            self._unregister()
            self._unregister = None
        if self._channel is not None:
            self._channel.leave()
            self._channel = None

    def enter(self, phase: str, step: int | None = None) -> None:
        """Records that the main thread enters a phase, one of `position.PHASES`, which counts as progress.

        Args:
            step: its step; the previous phase's by default.
        """
        before, now = self._position, time.monotonic()
        if now - before.at_seconds > self._longest_seconds and before.phase != START:
            self._longest_seconds = now - before.at_seconds
        if self._is_starting and (phase in ("evaluation", "save") or (phase == "data" and before.phase != START)):
            self._is_starting = False
        step = before.step if step is None else step
        self._position = Position(phase, step, before.events + 1, now, self._pace)

    def beat(self, phase: str | None = None) -> None:
        """Records progress of long work.

        Args:
            phase: counts only if the main thread is in this phase; required in other threads.
        """
        if phase is None or phase == self._position.phase:
            self.enter(self._position.phase)

    def trained(self, data_seconds: float, computing_seconds: float) -> None:
        """Records the duration of a step, without waiting for other ranks; sent with the next progress."""
        steps, data_milliseconds, computing_milliseconds = self._pace
        self._pace = RankPace(
            steps + 1,
            data_milliseconds + round(1000 * data_seconds),
            computing_milliseconds + round(1000 * computing_seconds),
        )

    def host(self, rank: int) -> str:
        """The host name of a rank."""
        return "" if self._connected is None else self._connected.processes[rank].host

    def fail(self, code: int, text: str) -> bool:
        """Reports the error that ends this rank to the other ranks.

        Does not return if there are other ranks: one of them prints the first error, and every rank exits with its
        code.

        Args:
            code: the exit code; an error of another rank takes precedence over `ExitCode.REQUEUE`, which it may have
                caused.
            text: the message, without a prefix.

        Returns:
            False: no other rank prints the error, because there is none, or none responds.
        """
        if self._report(code, text, is_ready=True):
            self._await_end()
        return False

    def peers_answer(self) -> bool:
        """Pings all other ranks, and waits for at most two seconds for their responses."""
        channel, connected = self._channel, self._connected
        if channel is None or connected is None or len(connected.processes) == 1:
            return True
        return channel.count_silent() == 0

    def seconds_without_progress(self) -> float:
        """Seconds since the main thread of this rank last made progress."""
        return time.monotonic() - self._position.at_seconds

    def ranks(self) -> list[dict[str, Any]]:
        """The last reported position of each rank; on rank 0, only its own without a channel."""
        ranks = [] if self._channel is None else self._channel.ranks()
        if ranks:
            return ranks
        position = self._position
        idle_seconds = round(time.monotonic() - position.at_seconds, 3)
        entry = {"phase": position.phase, "step": position.step, "idle_seconds": idle_seconds}
        return [{"rank": 0, "state": "here", "heard_seconds": 0.0, **entry}]

    def poll_ranks(self) -> None:
        """Updates `ranks`: pings all ranks and waits for at most two seconds; on a rank with a coordinator."""
        if self._channel is not None:
            self._channel.count_silent()

    def longest_seconds(self) -> float:
        """The longest interval without progress on this rank after start-up, in seconds."""
        return self._longest_seconds

    def is_saving(self) -> bool:
        """True while a checkpoint is being written, by the main thread or in the background."""
        return self._position.phase == "save" or self.has_background_save()

    def position(self) -> Position:
        return self._position

    def is_starting(self) -> bool:
        """True until this rank has finished its first step."""
        return self._is_starting

    def show(self, verdict: RunEnd) -> None:
        """Prints the reason why the run ends; called on the deciding rank, before any rank exits."""
        self._end_later(verdict.code)
        path = self._write_stacks(verdict.stacks) if verdict.stacks else None
        more = "" if path is None else f"\nThe stacks of all ranks are in {path}."
        process_exit.record_failure(verdict.code, verdict.text + more)
        log.error(verdict.text + more, rank=verdict.rank)

    def end(self, verdict: RunEnd) -> None:
        """Ends this rank, and kills unresponsive ranks on this machine."""
        self._end_later(verdict.code)
        for rank in verdict.silent:
            if self._connected is not None:
                self._connected.processes[rank].kill()
        process_exit.end_process(verdict.code, verdict.text, is_shown=True)

    def _leave_with(self, error: BaseException) -> None:
        """Ends this rank with an error, after everything else is closed.

        If another rank will print the error, this one exits immediately, so that ranks that communicate with it notice;
        but if the error may be caused by another rank's, it first receives the exit code of the run.
        """
        code, channel, text = process_exit.show_failure(error), self._channel, self._own_error
        if not text:
            return  # the others could not be notified, and this rank has printed it
        if self._report(code, text, is_ready=True) and channel is not None:
            if channel.reaches_first_coordinator and code != ExitCode.REQUEUE:
                process_exit.record_failure(code, text)
                return
            self._await_end()
        log.error(text)

    def _report(self, code: int, text: str, *, is_ready: bool) -> bool:
        """Reports an error to the other ranks, if any; not from the watching thread."""
        channel, connected = self._channel, self._connected
        if channel is None or connected is None or len(connected.processes) == 1:
            return False
        return channel.fail(Failure(code, text[:TEXT_CHARACTERS], is_ready))

    def _on_failure(self, code: int, text: str) -> bool:
        """Reports the error that ends this process to the other ranks; the main thread first closes its resources."""
        if threading.current_thread() is threading.main_thread():
            self._own_error = text if self._report(code, text, is_ready=False) else ""
            return bool(self._own_error)
        # A thread ends the process because the main thread is stuck; after a signal this must not take long.
        if self._report(code, text, is_ready=True):
            self._await_end(_THREAD_SECONDS)
        return False

    def _await_end(self, most_seconds: float | None = None) -> None:
        """Waits until the watching thread ends the process; returns if it does not."""
        wait_seconds = self._closing_seconds + _GRACE_SECONDS if most_seconds is None else most_seconds
        until = time.monotonic() + wait_seconds
        while time.monotonic() < until and self._channel is not None and self._channel.is_alive:
            time.sleep(0.02)

    def _end_later(self, code: int) -> None:
        timer = threading.Timer(_LAST_SECONDS, os._exit, [code])
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started
            timer.start()

    def _write_stacks(self, text: str) -> Path | None:
        """Writes the stacks to a new file; None without a folder, or if it does not respond."""
        written: list[Path] = []

        def write() -> None:
            folder = self.report_folder
            if folder is None or not folder.is_dir():
                return
            for number in range(1, 1000):
                path = folder / f"hang-{number}.txt"
                with contextlib.suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
                    file.write(text + "\n")
                    written.append(path)
                    return

        def try_to_write() -> None:
            with contextlib.suppress(OSError):
                write()

        thread = threading.Thread(target=try_to_write, daemon=True)
        with contextlib.suppress(RuntimeError):
            thread.start()
            thread.join(_FILE_SECONDS)
        return written[0] if written else None
