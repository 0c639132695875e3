"""The watchdog: no rank of a run hangs or ends unnoticed.

A rank that makes no progress for `--hang-timeout-seconds` ends the run with code 76 and one message that names it; one
that ends without a message or with an error ends it within seconds, and the error that came first is shown once.
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

# Ending may block, for example on a file system that hangs; then the process ends without the rest.
_LAST_SECONDS = 5.0
_FILE_SECONDS = 2.0
_THREAD_SECONDS = 1.0
# How much longer than the others may take to close their files a rank waits for the message that ends it.
_PATIENCE_SECONDS = 10.0


@final
class Watch:
    """Reports where this rank is, and shares with the other ranks how it fails; a context manager.

    Without `open` it watches nothing. All methods but `open` and `enter` may be called from any thread.

    Attributes:
        report_folder: where the stacks of all ranks are written when the run hangs, if the folder exists.
        writes_beside: whether a checkpoint is being written in the background.
    """

    def __init__(self) -> None:
        self.report_folder: Path | None = None
        self.writes_beside: Callable[[], bool] = lambda: False
        self._position = first_position()
        self._longest_seconds = 0.0
        self._is_starting = True
        self._meeting: ConnectedRanks | None = None
        self._channel: Channel | None = None
        self._closing_seconds = 0.0
        self._own_error = ""
        self._pace = RankPace()
        self._forget: Callable[[], None] | None = None

    def open(self, mesh: ParallelMesh, meeting_at: tuple[str, int], limits: WatchLimits) -> None:
        """Connects the ranks and starts to watch them; collective over the mesh.

        Args:
            meeting_at: host and port at which the ranks found each other.
        """
        rank, size = mesh.world.rank, mesh.world.size
        if size == 1 and not limits.hang_seconds:
            return
        self._meeting = meeting = connect_ranks(mesh, meeting_at)
        if meeting is None:
            return
        self._closing_seconds = limits.closing_seconds
        now, coordinator = time.monotonic(), None
        if rank in meeting.coordinators:
            first = None if rank == 0 else 0
            coordinator = Coordinator(rank, first, meeting.processes, meeting.token, limits, now)
        relayed = None if meeting.listener is None or coordinator is not None else Peers(meeting.token, size, rank)
        is_relayed = bool(meeting.fallback)
        links = [Link.open(one, address, rank, now, is_relayed=is_relayed) for address, one in meeting.connected]
        self._channel = Channel(
            self,
            limits,
            links,
            coordinator,
            meeting.listener,
            rank,
            size,
            relayed=relayed,
            coordinators=meeting.fallback,
        )
        self._channel.start()
        if size > 1 and process_exit.is_program():
            self._forget = process_exit.on_failure(self._on_failure)

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._forget is not None and isinstance(error, Exception | KeyboardInterrupt):
            self._leave_with(error)
            return
        self.enter(END)
        if self._forget is not None:
            self._forget()
            self._forget = None
        if self._channel is not None:
            self._channel.leave()
            self._channel = None

    def enter(self, phase: str, step: int | None = None) -> None:
        """Notes that the main thread enters a phase, one of `position.PHASES`; that is progress.

        Args:
            step: the step it belongs to; the previous phase's if left out.
        """
        before, now = self._position, time.monotonic()
        if now - before.at_seconds > self._longest_seconds and before.phase != START:
            self._longest_seconds = now - before.at_seconds
        if self._is_starting and (phase in ("evaluation", "save") or (phase == "data" and before.phase != START)):
            self._is_starting = False
        place = before.step if step is None else step
        self._position = Position(phase, place, before.events + 1, now, self._pace)

    def beat(self, phase: str | None = None) -> None:
        """Notes that long work makes progress.

        Args:
            phase: counts only if the main thread is in this phase; a thread that works alongside it must say which.
        """
        if phase is None or phase == self._position.phase:
            self.enter(self._position.phase)

    def trained(self, data_seconds: float, computing_seconds: float) -> None:
        """Notes how long a step took, less what this rank waited for others; the next progress tells it."""
        steps, data_milliseconds, computing_milliseconds = self._pace
        self._pace = RankPace(
            steps + 1,
            data_milliseconds + round(1000 * data_seconds),
            computing_milliseconds + round(1000 * computing_seconds),
        )

    def host(self, rank: int) -> str:
        """The name of the host on which a rank runs."""
        return "" if self._meeting is None else self._meeting.processes[rank].host

    def fail(self, code: int, text: str) -> bool:
        """Tells the other ranks that this one ends with an error.

        Where there are others, this does not return: one of them shows the error that came first, and every rank,
        this one included, ends with its code.

        Args:
            code: the exit code; `ExitCode.REQUEUE` gives way to an error of another rank, which may be its cause.
            text: what the user is to see, without a prefix.

        Returns:
            False: no other rank shows the error, because this process is alone or none answers.
        """
        if self._report(code, text, is_ready=True):
            self._await_end()
        return False

    def peers_answer(self) -> bool:
        """Asks all other ranks for a sign of life, and waits for it for at most two seconds."""
        channel, meeting = self._channel, self._meeting
        if channel is None or meeting is None or len(meeting.processes) == 1:
            return True
        return channel.count_silent() == 0

    def seconds_without_progress(self) -> float:
        """Seconds since the main thread of this rank entered a phase or made progress in one."""
        return time.monotonic() - self._position.at_seconds

    def ranks(self) -> list[dict[str, Any]]:
        """Where each rank was when it last reported; for rank 0, which without a channel knows only itself."""
        known = [] if self._channel is None else self._channel.ranks()
        if known:
            return known
        position = self._position
        idle_seconds = round(time.monotonic() - position.at_seconds, 3)
        own = {"phase": position.phase, "step": position.step, "idle_seconds": idle_seconds}
        return [{"rank": 0, "state": "here", "heard_seconds": 0.0, **own}]

    def ask_ranks(self) -> None:
        """Updates `ranks`: pings all ranks and waits for at most two seconds; on a rank with a coordinator."""
        if self._channel is not None:
            self._channel.count_silent()

    def longest_seconds(self) -> float:
        """The longest that this rank went without progress after start-up before it made some again, in seconds."""
        return self._longest_seconds

    def is_saving(self) -> bool:
        """Whether a checkpoint is being written, by the main thread or in the background."""
        return self._position.phase == "save" or self.writes_beside()

    def position(self) -> Position:
        return self._position

    def is_starting(self) -> bool:
        """Whether this rank has not finished its first step."""
        return self._is_starting

    def show(self, verdict: RunEnd) -> None:
        """Shows why the run ends; called on the one rank that decides it, before any of them ends."""
        self._end_later(verdict.code)
        path = self._write_stacks(verdict.stacks) if verdict.stacks else None
        more = "" if path is None else f"\nThe stacks of all ranks are in {path}."
        process_exit.record_failure(verdict.code, verdict.text + more)
        log.error(verdict.text + more, rank=verdict.rank)

    def end(self, verdict: RunEnd) -> None:
        """Ends this rank, and those on this machine that do not answer."""
        self._end_later(verdict.code)
        for rank in verdict.silent:
            if self._meeting is not None:
                self._meeting.processes[rank].kill()
        process_exit.end_process(verdict.code, verdict.text, is_shown=True)

    def _leave_with(self, error: BaseException) -> None:
        """Leaves the run with an error, when everything else is closed.

        If another rank will show the error, this one ends at once, so that ranks that communicate with it notice it;
        but a rank whose error may be the result of another's first learns with which code the run ends.
        """
        code, channel, text = process_exit.show_failure(error), self._channel, self._own_error
        if not text:
            return  # the others could not be notified, and this rank has shown it
        if self._report(code, text, is_ready=True) and channel is not None:
            if channel.reaches_first_coordinator and code != ExitCode.REQUEUE:
                process_exit.record_failure(code, text)
                return
            self._await_end()
        log.error(text)

    def _report(self, code: int, text: str, *, is_ready: bool) -> bool:
        """Tells the other ranks of an error, if there are any; not from the thread that watches them."""
        channel, meeting = self._channel, self._meeting
        if channel is None or meeting is None or len(meeting.processes) == 1:
            return False
        return channel.fail(Failure(code, text[:TEXT_CHARACTERS], is_ready))

    def _on_failure(self, code: int, text: str) -> bool:
        """Tells the other ranks of the error that ends this process; the main thread first closes what it has open."""
        if threading.current_thread() is threading.main_thread():
            self._own_error = text if self._report(code, text, is_ready=False) else ""
            return bool(self._own_error)
        # A thread ends the process because the main thread is stuck: with a signal that must not take long.
        if self._report(code, text, is_ready=True):
            self._await_end(_THREAD_SECONDS)
        return False

    def _await_end(self, most_seconds: float | None = None) -> None:
        """Waits until the thread that watches ends the process; returns if it does not."""
        patience_seconds = self._closing_seconds + _PATIENCE_SECONDS if most_seconds is None else most_seconds
        until = time.monotonic() + patience_seconds
        while time.monotonic() < until and self._channel is not None and self._channel.is_alive:
            time.sleep(0.02)

    def _end_later(self, code: int) -> None:
        timer = threading.Timer(_LAST_SECONDS, os._exit, [code])
        timer.daemon = True
        with contextlib.suppress(RuntimeError):  # no thread can be started
            timer.start()

    def _write_stacks(self, text: str) -> Path | None:
        """Writes the stacks to a new file; None if there is no folder for it, or none that answers."""
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
