"""A thread that writes checkpoints while training continues.

The main thread lists the pieces (`start_save`); the thread copies them to host memory and writes the copy. Weights,
master weights and moments only change in the optimizer step, so the copy overlaps the next forward and backward pass,
and `wait_for_copy` is called before the update. The threads of all ranks communicate over `mesh.background`, which is
theirs alone. The training loop decides when to save and how to handle a failure.
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
from megatron.checkpoint.snapshot import Pieces, Snapshot, plan_copy, take_snapshot
from megatron.errors import CheckpointError
from megatron.parallel.agreement import gather_on_first, run_on_all, run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.messages import is_lost_peer
from megatron.parallel.pieces import PieceKey

# How long a failed run waits for the writer to stop, which may itself be waiting for a rank that hangs.
_EXIT_SECONDS = 5.0
_POLL_SECONDS = 1.0


@dataclass(frozen=True)
class SaveOutcome:
    """The result of a save.

    Attributes:
        failure: the exception; None if the checkpoint is committed.
        seconds: time since `start_save`.
    """

    step: int
    failure: Exception | None
    seconds: float


@final
class BackgroundWriter:
    """Writes the checkpoints of a run, one at a time, on one thread.

    A save has the same outcome on all ranks, but not at the same time. A context manager: entering it starts the
    thread; exiting waits for the save in progress, unless the run ends because of another rank or an interrupt.

    Args:
        directory: the folder of all checkpoints.
        options: used for every save; `after_commit` is called on the thread, and `beat` is replaced.

    Attributes:
        after_commit: may be set before the first save.
        stall_seconds: time that training has waited for copies and saves so far.
        beat: called about once a second while a thread waits for a save or copy that makes progress.
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
        self._is_abandoned = failure is not None and _aborts_save(failure)
        self._jobs.put(None)
        self._thread.join(_EXIT_SECONDS if self._is_abandoned else None)
        outcome = self._outcome
        if outcome is not None and outcome.failure is not None and not self._is_abandoned:
            log.warning(f"the checkpoint of iteration {outcome.step} was not saved: {outcome.failure}")

    def reserve(self, size_bytes: int) -> None:
        """Allocates host memory for copies of this many bytes, now rather than at the first save.

        Raises:
            MemoryError: not enough memory.
        """
        if self._buffer.numel() < size_bytes:
            self._buffer = device.host_buffer(0, self._mesh.device)  # frees the smaller one first
            self._buffer = device.host_buffer(size_bytes, self._mesh.device)

    def start_save(self, step: int, pieces: Pieces, record: Mapping[str, Any]) -> None:
        """Starts a save and returns immediately; on every rank, after `wait`.

        Args:
            pieces: their values must not change until `wait_for_copy` returns.
        """
        if not self._idle.is_set():
            raise RuntimeError("a save is in progress; wait for it before the next one starts")
        listed = list(pieces)  # now, since DeepSpeed rearranges the optimizer before it calls `wait_for_copy`
        self._copies.mark()
        self._outcome = None
        self._copied.clear()
        self._idle.clear()
        self._jobs.put(_Save(step, listed, record, time.monotonic()))

    def wait_for_copy(self) -> None:
        """Blocks until the values that are being saved may change."""
        self._wait(self._copied)
        self._copies.hold_device()

    def wait(self) -> None:
        """Blocks until no save is in progress.

        Raises:
            CheckpointError: the thread has terminated.
        """
        self._wait(self._idle)

    @property
    def is_writing(self) -> bool:
        """True while a save is in progress; may be called from any thread."""
        return not self._idle.is_set() and self._thread.is_alive()

    def take_outcome(self) -> SaveOutcome | None:
        """Returns the outcome of the last save, once; None while it is in progress.

        Raises:
            CheckpointError: the thread has terminated.
        """
        if not self._idle.is_set():
            self._check_thread()
            return None
        outcome, self._outcome = self._outcome, None
        return outcome

    def _wait(self, event: threading.Event) -> None:
        if event.is_set():
            return
        started_at, seen = time.monotonic(), self._parts
        while not event.wait(_POLL_SECONDS):
            self._check_thread()
            if self._parts != seen:
                seen = self._parts
                self.beat()
        self.stall_seconds += time.monotonic() - started_at

    def _check_thread(self) -> None:
        if not self._thread.is_alive():
            raise CheckpointError(
                "the checkpoint writer thread has terminated, so no checkpoint can be saved. Restart the run; if it "
                "happens again, use --no-async-save."
            )

    def _run(self) -> None:
        try:
            device.use_on_this_thread(self._mesh.device)
            while (save := self._jobs.get()) is not None:
                failure: Exception | None = None
                try:
                    self._write(save)
                except Exception as caught:  # any type: the main thread raises it
                    failure = caught
                self._outcome = SaveOutcome(save.step, failure, time.monotonic() - save.started_at)
                self._idle.set()
        finally:
            self._copied.set()

    def _write(self, save: _Save) -> None:
        snapshot = run_on_all(self._mesh, lambda: self._copy(save.pieces))
        options = dataclasses.replace(self._options, after_commit=self.after_commit, beat=self._advance)
        write_snapshot(self._directory, save.step, snapshot, save.record, self._mesh, options)

    @torch.no_grad()
    def _copy(self, pieces: list[tuple[PieceKey, torch.Tensor]]) -> Snapshot:
        """Copies the pieces to host memory, after which the values may change, and empties the list."""
        try:
            snapshot = take_snapshot(pieces)
            self.reserve(snapshot.size_bytes)
            copied, copies = plan_copy(snapshot, self._buffer)
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
    """The reason why the copies of all ranks do not fit into the host memory of some machine, or None; collective.

    Args:
        size_bytes: size of this rank's copy.
        available_bytes: memory available on this rank's machine; None if unknown.
    """
    reports = gather_on_first(mesh, lambda: [socket.gethostname(), size_bytes, available_bytes])

    def check() -> str | None:
        machines: dict[str, list[tuple[int, int | None]]] = {}
        for host, size, available in reports or []:
            machines.setdefault(host, []).append((size, available))
        for host, ranks in machines.items():
            needed = sum(size for size, _ in ranks)
            free = min((available for _, available in ranks if available is not None), default=None)
            if free is not None and needed > free:
                return (
                    f"a copy of the state of the {len(ranks)} rank(s) on {host} takes {needed} bytes of host memory, "
                    f"but only {free} bytes are available"
                )
        return None

    problem: str | None = run_on_first(mesh, check)
    return problem


@dataclass(frozen=True)
class _Save:
    """A requested save.

    Attributes:
        pieces: emptied as soon as they are copied, since some are temporary tensors.
    """

    step: int
    pieces: list[tuple[PieceKey, torch.Tensor]]
    record: Mapping[str, Any]
    started_at: float


def _aborts_save(failure: BaseException) -> bool:
    """True if a failure of the run also ends the save: another rank is lost, or this one was interrupted."""
    return not isinstance(failure, Exception) or is_lost_peer(failure)


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event
