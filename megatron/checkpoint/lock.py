"""An exclusive lock on a checkpoint directory: refuses a second job, and takes over the lock of a terminated one.

Three signals show that the holder is alive; the strongest that is available decides: the kernel's lock on the file
(`flock`, which ends with the holder, even after SIGKILL, and which some network file systems share between machines),
the holder's process if it runs on this machine, and a counter in the file that the holder keeps incrementing. The
counter is timed with the observer's monotonic clock; file times and wall clocks are not used.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import final

from megatron import log
from megatron.errors import CheckpointError, LaunchError, StorageError
from megatron.files.replacing import sync_file
from megatron.parallel.agreement import run_on_first
from megatron.parallel.mesh import ParallelMesh
from megatron.parallel.processes import born_at, machine_id, process_namespace

LOCK_NAME = ".run.lock"

_RECORD_BYTES = 1024
_SETTLE_SECONDS = 1.0
_NO_FLOCK = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@dataclass(frozen=True)
class Holder:
    """The holder of a lock; `machine` identifies a boot of a kernel, `processes` a PID namespace on it."""

    run: str
    host: str
    machine: str
    processes: str
    process_id: int
    born: str
    counter: int = 0
    released: bool = False

    @classmethod
    def this_process(cls) -> Holder:
        process_id = os.getpid()
        return cls(
            secrets.token_hex(8),
            socket.gethostname(),
            machine_id(),
            process_namespace(),
            process_id,
            born_at(process_id),
        )

    def __str__(self) -> str:
        return f"run {self.run} (process {self.process_id} on host {self.host})"


@final
class CheckpointLock:
    """Locks `directory` for this run; a context manager, collective over the mesh on entry.

    Only global rank 0 accesses the file; one of its threads increments the counter.

    Args:
        heartbeat_seconds: interval between increments of the counter.
        stale_seconds: time without a new count after which a holder on another machine is considered gone.
    """

    def __init__(
        self, directory: Path, mesh: ParallelMesh, *, heartbeat_seconds: float = 5, stale_seconds: float = 60
    ) -> None:
        self._path = Path(directory) / LOCK_NAME
        self._mesh = mesh
        self._heartbeat_seconds = heartbeat_seconds
        self._stale_seconds = stale_seconds
        self._handle: int | None = None
        self._holder: Holder | None = None
        self._stop = threading.Event()
        self._checking = threading.Lock()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> CheckpointLock:
        self.acquire()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def acquire(self) -> None:
        """Acquires the lock, on every rank or on none.

        Raises:
            LaunchError: another running job holds it; names that job.
            StorageError: the lock file cannot be created or written.
        """
        refusal, file_problem = run_on_first(self._mesh, self._try_acquire)
        if refusal:
            raise LaunchError(refusal)
        if file_problem:
            raise StorageError(file_problem)

    def check(self) -> None:
        """Checks that this job still holds the lock; recreates a directory that was deleted. Rank 0 only.

        Raises:
            CheckpointError: another job has taken over the lock, because this one appeared to be gone.
        """
        if self._holder is None or self._handle is None:
            return
        holder: Holder | None = None
        try:
            with self._checking:
                if not self._path.parent.exists():
                    self._restore(self._holder, self._handle)
            holder = _read_path(self._path)
        except OSError as failure:
            if not isinstance(failure, FileNotFoundError):
                log.warning(f"cannot check the lock {self._path}: {failure}")
                return
        else:
            if holder is None or holder.run == self._holder.run:
                return
        taken = "is no longer held by this job" + (f", but by {holder}" if holder else "")
        raise CheckpointError(
            f"{self._path} {taken}. This job was suspended for too long, or the file was deleted; it must not "
            "write here any more. Stop it."
        )

    def _restore(self, holder: Holder, handle: int) -> None:
        """Recreates and locks a deleted directory, unless another job is faster."""
        log.warning(f"{self._path.parent} was deleted during the run; it is recreated for the next checkpoint")
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            new = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
            _flock(new)
            _write_holder(new, holder)
            os.dup2(new, handle, inheritable=False)
            os.close(new)

    def release(self) -> None:
        """Releases the lock; a no-op if it is not held."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._handle is None or self._holder is None:
            return
        with contextlib.suppress(OSError):
            holder = _read_path(self._path)
            if holder is not None and holder.run == self._holder.run:
                _write_holder(self._handle, replace(self._holder, released=True))
                os.unlink(self._path)
        os.close(self._handle)
        self._handle = None

    def _try_acquire(self) -> tuple[str | None, str | None]:
        """Returns the refusal and the problem with the file; both None if the lock was acquired."""
        self._stop.clear()
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            refusal = self._contend()
        except OSError as failure:
            name = errno.errorcode.get(failure.errno or 0, "unknown error")
            return None, (
                f"cannot lock {self._path}: {failure.strerror or failure} ({name}). "
                "The directory must be writable for this user."
            )
        if refusal is None:
            self._thread = threading.Thread(target=self._beat, name="checkpoint-lock", daemon=True)
            self._thread.start()
        return refusal, None

    def _contend(self) -> str | None:
        """Retries until the locked file is the one at the path; returns the refusal, or None."""
        while True:
            handle = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666)
            keep = False
            try:
                locked = _flock(handle)
                holder = _read_holder(handle)
                if locked is False and not (holder and _is_gone(holder)):
                    return self._refusal(holder)
                if not _same_file(handle, self._path):
                    continue
                if locked is False:  # a child process of the terminated holder has its lock: replace the file
                    log.warning(f"taking over {self._path} from {holder}, whose process is gone")
                    os.unlink(self._path)
                    continue
                if holder and not holder.released and not self._is_stale(holder, locked):
                    return self._refusal(holder)
                if not _same_file(handle, self._path):
                    continue
                this = Holder.this_process()
                _write_holder(handle, this)
                sync_file(handle)
                if locked is None:  # without a kernel lock two jobs may get here at once: the later writer wins
                    time.sleep(_SETTLE_SECONDS)
                    winner = _read_holder(handle)
                    if winner is not None and winner.run != this.run:
                        return self._refusal(winner)
                self._holder = this
                self._handle = handle
                keep = True
                return None
            finally:
                if not keep:
                    os.close(handle)

    def _is_stale(self, holder: Holder, locked: bool | None) -> bool:
        """True if the holder in the file is gone.

        Args:
            locked: this process holds the kernel lock; None if the file system has none.
        """
        here = Holder.this_process()
        if locked and holder.machine and holder.machine == here.machine:
            log.warning(f"taking over {self._path} from {holder}, which has terminated")
            return True
        if _is_gone(holder):
            log.warning(f"taking over {self._path} from {holder}, whose process is gone")
            return True
        if _runs_here(holder):
            return False
        log.warning(
            f"{self._path} is held by {holder}, whose process is not visible from this machine; "
            f"waiting {self._stale_seconds:g} s for a heartbeat"
        )
        started_at = time.monotonic()
        while time.monotonic() - started_at < self._stale_seconds:
            time.sleep(min(self._heartbeat_seconds, self._stale_seconds) / 4)
            try:
                seen = _read_path(self._path)
            except FileNotFoundError:
                return True
            if seen is not None and seen.released:
                return True
            if seen is not None and (seen.run, seen.counter) != (holder.run, holder.counter):
                return False
        log.warning(f"taking over {self._path} from {holder}, which sent no heartbeat")
        return True

    def _refusal(self, holder: Holder | None) -> str:
        return (
            f"{self._path.parent} is in use by {holder or 'another job'}: two jobs must not save to one directory. "
            "Stop that job, or give --save another directory."
        )

    def _beat(self) -> None:
        while not self._stop.wait(self._heartbeat_seconds):
            if self._holder is None or self._handle is None:
                return
            try:
                self.check()
                self._holder = replace(self._holder, counter=self._holder.counter + 1)
                _write_holder(self._handle, self._holder)
            except CheckpointError as lost:
                log.error(str(lost))
                return
            except OSError as failure:
                log.warning(f"cannot renew {self._path}: {failure}")


def _flock(handle: int) -> bool | None:
    """Returns True if locked, False if another process holds the lock, None if the file system has no locks."""
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as failure:
        if failure.errno in _NO_FLOCK:
            return None
        raise
    return True


def _runs_here(holder: Holder) -> bool:
    """True if the holder runs, or ran, where its process is visible: same kernel, same PID namespace."""
    here = Holder.this_process()
    return bool(holder.machine) and (holder.machine, holder.processes) == (here.machine, here.processes)


def _is_gone(holder: Holder) -> bool:
    """True if the holder has certainly terminated: it ran here, and its PID is free or was reused."""
    return _runs_here(holder) and born_at(holder.process_id) != holder.born


def _write_holder(handle: int, holder: Holder) -> None:
    text = json.dumps(asdict(holder)).encode()
    os.pwrite(handle, text[: _RECORD_BYTES - 1].ljust(_RECORD_BYTES - 1) + b"\n", 0)


def _read_holder(handle: int) -> Holder | None:
    """The holder in the file; None if the file is new, or its writer was killed during the first write."""
    try:
        values = json.loads(os.pread(handle, _RECORD_BYTES, 0))
        holder = Holder(**values)
        whole = isinstance(holder.counter, int) and isinstance(holder.process_id, int) and isinstance(holder.run, str)
    except (ValueError, TypeError, RecursionError):
        return None
    return holder if whole else None


def _read_path(path: Path) -> Holder | None:
    """The holder in the file at a path; reopened, so that a network file system revalidates it.

    Raises:
        OSError: the file is missing or cannot be read.
    """
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return _read_holder(handle)
    finally:
        os.close(handle)


def _same_file(handle: int, path: Path) -> bool:
    try:
        there = os.stat(path, follow_symlinks=False)
    except FileNotFoundError:
        return False
    here = os.fstat(handle)
    return (here.st_dev, here.st_ino) == (there.st_dev, there.st_ino)
