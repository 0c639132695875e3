"""One thread of a run that writes its checkpoints while training continues.

The main thread lists the pieces and hands them over (`begin`); the thread copies them to host memory and writes the
copy. Weights, masters and moments only change in the optimizer's update, so the copy runs during the next forward and
backward pass, and `wait_for_copy` is called before the update. The threads of all ranks talk over
`mesh.background`, which nothing else uses. When to save and what a failure means is decided by the training loop.
"""

from __future__ import annotations

import dataclasses
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, final

import torch

from megatron import device, log
from megatron.checkpoint.saving import SaveOptions, write_snapshot
from megatron.checkpoint.snapshot import Pieces, Snapshot, laid_out, take_snapshot
from megatron.errors import CheckpointError
from megatron.parallel.agreement import gather_on_first, run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import is_lost_peer
from megatron.parallel.pieces import PieceKey

# How long the end of a run that failed waits for a writer that was asked to stop: it may wait for a rank that hangs.
_LEAVE_SECONDS = 5.0
_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class SaveOutcome:
    """How a save ended.

    Attributes:
        failure: what it raised; None if the checkpoint is committed.
        seconds: from `begin` to its end.
    """

    step: int
    failure: Exception | None
    seconds: float


@final
class BackgroundWriter:
    """Writes the checkpoints of a run, one at a time, on a thread that is started once.

    How a save ends is the same on all ranks, but they learn it at different times. A context manager: entering it
    starts the thread, and leaving it waits for a save that is being written, unless the run ends because of another
    rank or by an interrupt.

    Args:
        directory: where the checkpoints go.
        options: of every save; `after_commit` is called on the thread, and `beat` is replaced.

    Attributes:
        after_commit: may be set before the first save.
        stall_seconds: how long training has waited for copies and for saves so far.
        beat: called about once a second, on the thread that waits for a save or a copy, if that has advanced.
    """

    def __init__(self, directory: Path, mesh: ParallelMesh, options: SaveOptions | None = None) -> None:
        self._directory = directory
        self._mesh = dataclasses.replace(mesh, control=mesh.background)
        self._options = options or SaveOptions()
        self.after_commit = self._options.after_commit
        self.beat: Callable[[], None] = lambda: None
        self._buffer = device.host_buffer(0, mesh.device)
        self._copies = device.HostCopies(mesh.device)
        self._jobs: queue.SimpleQueue[_Save | None] = queue.SimpleQueue()
        self._copied = _set_event()
        self._idle = _set_event()
        self._outcome: SaveOutcome | None = None
        self._is_abandoned = False
        self._parts = 0
        self.stall_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name="checkpoint-writer", daemon=True)

    def __enter__(self) -> BackgroundWriter:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._is_abandoned = failure is not None and _leaves_no_time(failure)
        self._jobs.put(None)
        self._thread.join(_LEAVE_SECONDS if self._is_abandoned else None)
        outcome = self._outcome
        if outcome is not None and outcome.failure is not None and not self._is_abandoned:
            log.warning(f"the checkpoint of iteration {outcome.step} was not saved: {outcome.failure}")

    def reserve(self, size_bytes: int) -> None:
        """Allocates host memory for copies of this many bytes, now rather than at the first save.

        Raises:
            MemoryError: the system does not have it.
        """
        if self._buffer.numel() < size_bytes:
            self._buffer = device.host_buffer(0, self._mesh.device)  # the smaller one is given back first
            self._buffer = device.host_buffer(size_bytes, self._mesh.device)

    def begin(self, step: int, pieces: Pieces, record: Mapping[str, Any]) -> None:
        """Begins a save and returns at once; on every rank, after `wait`.

        Args:
            pieces: listed at once, since DeepSpeed rearranges the optimizer before it calls `wait_for_copy`. Until
                that returns, their values must not change.
        """
        if not self._idle.is_set():
            raise RuntimeError("a save is being written; wait for it before the next one begins")
        listed = list(pieces)
        self._copies.mark()
        self._outcome = None
        self._copied.clear()
        self._idle.clear()
        self._jobs.put(_Save(step, listed, record, time.monotonic()))

    def wait_for_copy(self) -> None:
        """Returns when the values that are being saved may change."""
        self._wait(self._copied)
        self._copies.hold_device()

    def wait(self) -> None:
        """Returns when no save is being written.

        Raises:
            CheckpointError: the thread has died.
        """
        self._wait(self._idle)

    @property
    def is_writing(self) -> bool:
        """Whether a save has begun and not ended; any thread may ask."""
        return not self._idle.is_set() and self._thread.is_alive()

    def take_outcome(self) -> SaveOutcome | None:
        """How the last save ended, once; None while it is being written.

        Raises:
            CheckpointError: the thread has died.
        """
        if not self._idle.is_set():
            self._check_thread()
            return None
        outcome, self._outcome = self._outcome, None
        return outcome

    def _wait(self, event: threading.Event) -> None:
        if event.is_set():
            return
        began_at, seen = time.monotonic(), self._parts
        while not event.wait(_LOOK_SECONDS):
            self._check_thread()
            if self._parts != seen:
                seen = self._parts
                self.beat()
        self.stall_seconds += time.monotonic() - began_at

    def _check_thread(self) -> None:
        if not self._thread.is_alive():
            raise CheckpointError(
                "the thread that writes checkpoints has died, so none can be saved. Start again; give --no-async-save "
                "if it dies again."
            )

    def _run(self) -> None:
        try:
            device.use_on_this_thread(self._mesh.device)
            while (save := self._jobs.get()) is not None:
                failure: Exception | None = None
                try:
                    self._write(save)
                except Exception as caught:  # of any type: it becomes an error of the run
                    failure = caught
                self._outcome = SaveOutcome(save.step, failure, time.monotonic() - save.began_at)
                self._idle.set()
        finally:
            self._copied.set()

    def _write(self, save: _Save) -> None:
        taken = run_on_all(self._mesh, lambda: self._copy(save.pieces))
        options = dataclasses.replace(self._options, after_commit=self.after_commit, beat=self._advance)
        write_snapshot(self._directory, save.step, taken, save.record, self._mesh, options)

    @torch.no_grad()
    def _copy(self, pieces: list[tuple[PieceKey, torch.Tensor]]) -> Snapshot:
        """A copy in host memory, after which the values may change; the list of pieces is empty then."""
        try:
            taken = take_snapshot(pieces)
            self.reserve(taken.size_bytes)
            copied, copies = laid_out(taken, self._buffer)
            self._copies.copy(copies)
        finally:
            self._copied.set()
        self._copies.wait()
        pieces.clear()
        return copied

    def _advance(self) -> None:
        if self._is_abandoned:
            raise CheckpointError("the run ended before the checkpoint was written.")
        self._parts += 1


def memory_problem(size_bytes: int, mesh: ParallelMesh, available_bytes: int | None) -> str | None:
    """Why the copies of all ranks do not fit into the memory of their machines; None if they do; collective.

    Args:
        size_bytes: what this rank's copy takes.
        available_bytes: what this rank sees of its machine's memory; None if unknown.
    """
    reports = gather_on_first(mesh, lambda: [socket.gethostname(), size_bytes, available_bytes])

    def judge() -> str | None:
        machines: dict[str, list[tuple[int, int | None]]] = {}
        for host, size, available in reports or []:
            machines.setdefault(host, []).append((size, available))
        for host, ranks in machines.items():
            need = sum(size for size, _ in ranks)
            room = min((available for _, available in ranks if available is not None), default=None)
            if room is not None and need > room:
                return (
                    f"a copy of the state of the {len(ranks)} rank(s) on {host} takes {need} bytes of host memory, and "
                    f"{room} bytes are available there"
                )
        return None

    problem: str | None = run_on_first(mesh, judge)
    return problem


@dataclass(frozen=True)
class _Save:
    """What is to be saved, and when the save was requested.

    Attributes:
        pieces: emptied as soon as they are copied, since some are tensors that were made for this save.
    """

    step: int
    pieces: list[tuple[PieceKey, torch.Tensor]]
    record: Mapping[str, Any]
    began_at: float


def _leaves_no_time(failure: BaseException) -> bool:
    """Whether a run ended for a reason that also ends the save: another rank is lost, or this one is interrupted."""
    return not isinstance(failure, Exception) or is_lost_peer(failure)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
