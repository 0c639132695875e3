"""The thread of a run that reads data ahead, and the requests and results it exchanges with the training thread."""

from __future__ import annotations

import _thread
import threading
from collections.abc import Iterable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from megatron import log
from megatron.errors import StorageError

Item = TypeVar("Item")

_START_SECONDS = 10.0
_CLOSE_SECONDS = 10.0
_CHECK_SECONDS = 0.5  # between two checks that the thread is alive


class ReadAhead:
    """A thread that turns iterables into lists, one after another, in the order of submission.

    It starts with the first request. If no thread can be started, a warning is logged once and every request is
    refused.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[PendingRead[Any] | None] = SimpleQueue()
        self._started = _taken_lock()
        self._ended = _taken_lock()
        self._is_started = False
        self._is_usable = True
        self._failure: BaseException | None = None

    def submit(self, source: Iterable[Item]) -> PendingRead[Item] | None:
        """Queues `source` to be read by the thread; returns None if no thread is running."""
        if not self._is_started:
            self._start()
        if not self._is_usable:
            return None
        read = PendingRead(self, source)
        self._requests.put(read)
        return read

    def close(self) -> None:
        """Stops the thread after its current read; one stuck in a read is abandoned with a warning."""
        if not self._is_started or not self._is_usable:
            return
        self._is_usable = False
        self._requests.put(None)
        if self._ended.acquire(timeout=_CLOSE_SECONDS):
            self._ended.release()
        else:
            log.warning(f"the read-ahead thread did not exit within {_CLOSE_SECONDS:g} s and is abandoned.")

    def check(self) -> None:
        """Checks that the thread is alive.

        Raises:
            StorageError: it exited.
        """
        if not self._ended.acquire(blocking=False):
            return
        self._ended.release()  # for later checks
        reason = "without an error" if self._failure is None else f"with {_described(self._failure)}"
        raise StorageError(
            f"The read-ahead thread exited {reason}. Free memory if it ran out, or disable the thread "
            "(--num-workers 0); then resume from the last checkpoint (--load)."
        ) from self._failure

    def _start(self) -> None:
        self._is_started = True
        try:
            # Not `threading.Thread`: its `start` waits forever for a thread that ran out of memory before its first
            # line.
            _thread.start_new_thread(self._serve, ())
            reason = "" if self._started.acquire(timeout=_START_SECONDS) else "it did not start running"
        except (RuntimeError, MemoryError) as failure:
            reason = str(failure) or type(failure).__name__
        if reason:
            self._is_usable = False
            self._requests.put(None)  # for a thread that starts running after all
            log.warning(
                f"the read-ahead thread could not be started ({reason}): batches are read on demand, which may be "
                "slower. Raise the limits on memory and processes, or set --num-workers 0."
            )

    def _serve(self) -> None:
        try:
            self._started.release()
            while (pending := self._requests.get()) is not None:
                pending.read()
        except BaseException as failure:  # raised where the next result is requested
            self._failure = failure
        finally:
            self._ended.release()


class PendingRead(Generic[Item]):
    """An iterable that the thread reads."""

    def __init__(self, thread: ReadAhead, source: Iterable[Item]) -> None:
        self._thread = thread
        self._source = source
        self._items: list[Item] = []
        self._failure: BaseException | None = None
        self._is_cancelled = False
        self._done = _taken_lock()

    def result(self) -> list[Item]:
        """Waits for the items.

        Raises:
            StorageError: the thread exited or ran out of memory.
            Exception: whatever the read raised.
        """
        self._wait()
        if self._failure is None:
            return self._items
        if isinstance(self._failure, Exception) and not isinstance(self._failure, MemoryError):
            raise self._failure
        raise StorageError(
            f"Reading data ahead failed with {_described(self._failure)}. Free memory if it ran out, or disable the "
            "thread (--num-workers 0); then resume from the last checkpoint (--load)."
        ) from self._failure

    def cancel(self) -> None:
        """Abandons the rest and waits until the thread no longer uses the source.

        Raises:
            StorageError: the thread exited.
        """
        self._is_cancelled = True
        self._wait()

    def abandon(self) -> None:
        """Abandons the rest without waiting."""
        self._is_cancelled = True

    def read(self) -> None:
        """Reads the items; called by the thread."""
        try:
            if not self._is_cancelled:
                for item in self._source:
                    self._items.append(item)
                    if self._is_cancelled:
                        break
        except BaseException as failure:  # raised by `result`
            self._failure = failure
        finally:
            self._done.release()

    def _wait(self) -> None:
        while not self._done.acquire(timeout=_CHECK_SECONDS):
            self._thread.check()
        self._done.release()


def _taken_lock() -> threading.Lock:
    """Returns an acquired lock; its release signals an event without allocating memory, which may have run out."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _described(failure: BaseException) -> str:
    text = str(failure)
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__
