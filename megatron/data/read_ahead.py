"""The one thread of a run that reads data ahead, and how requests and results change hands."""

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
_CHECK_SECONDS = 0.5  # between two looks at whether the thread still runs


class ReadAhead:
    """A thread that turns iterables into lists, one after the other, in the order they were submitted.

    It starts with the first request. `threading.Thread` is not used: its `start` waits forever for a thread that ran
    out of memory before its first line. If no thread can be started, a warning says so once, and every request is
    refused from then on.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[PendingRead[Any] | None] = SimpleQueue()
        self._started = _taken_lock()
        self._ended = _taken_lock()
        self._is_started = False
        self._is_usable = True
        self._failure: BaseException | None = None

    def submit(self, source: Iterable[Item]) -> PendingRead[Item] | None:
        """Starts reading `source` in the thread; None if there is no thread to read it."""
        if not self._is_started:
            self._start()
        if not self._is_usable:
            return None
        reading = PendingRead(self, source)
        self._requests.put(reading)
        return reading

    def close(self) -> None:
        """Ends the thread after the reading it is at; one that is stuck in a read is left behind with a warning."""
        if not self._is_started or not self._is_usable:
            return
        self._is_usable = False
        self._requests.put(None)
        if self._ended.acquire(timeout=_CLOSE_SECONDS):
            self._ended.release()
        else:
            log.warning(f"the thread that reads data ahead did not end within {_CLOSE_SECONDS:g} s and is left behind.")

    def check(self) -> None:
        """Checks that the thread still runs.

        Raises:
            StorageError: it ended.
        """
        if not self._ended.acquire(blocking=False):
            return
        self._ended.release()  # for those that ask later
        reason = "without an error" if self._failure is None else f"with {_described(self._failure)}"
        raise StorageError(
            f"The thread that reads data ahead ended {reason}. Free memory if that is what it lacked, or read without "
            "it (--num-workers 0); then resume from the last checkpoint (--load)."
        ) from self._failure

    def _start(self) -> None:
        self._is_started = True
        try:
            _thread.start_new_thread(self._serve, ())
            reason = "" if self._started.acquire(timeout=_START_SECONDS) else "it did not begin to run"
        except (RuntimeError, MemoryError) as failure:
            reason = str(failure) or type(failure).__name__
        if reason:
            self._is_usable = False
            self._requests.put(None)  # for a thread that begins to run after all
            log.warning(
                f"no thread could be started to read data ahead ({reason}): batches are read when they are needed, "
                "which may be slower. Raise the limits on memory and processes, or give --num-workers 0."
            )

    def _serve(self) -> None:
        try:
            self._started.release()
            while (reading := self._requests.get()) is not None:
                reading.read()
        except BaseException as failure:  # raised where the next result is asked for
            self._failure = failure
        finally:
            self._ended.release()


class PendingRead(Generic[Item]):
    """An iterable that is being read by the thread."""

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
            StorageError: the thread ended, or ran out of memory.
            Exception: what reading raised.
        """
        self._wait()
        if self._failure is None:
            return self._items
        if isinstance(self._failure, Exception) and not isinstance(self._failure, MemoryError):
            raise self._failure
        raise StorageError(
            f"Reading data ahead failed with {_described(self._failure)}. Free memory if that is what it lacked, or "
            "read without a thread (--num-workers 0); then resume from the last checkpoint (--load)."
        ) from self._failure

    def cancel(self) -> None:
        """Abandons the rest and waits until the thread no longer uses the source.

        Raises:
            StorageError: the thread ended.
        """
        self._is_cancelled = True
        self._wait()

    def abandon(self) -> None:
        """Abandons the rest without waiting."""
        self._is_cancelled = True

    def read(self) -> None:
        """Reads the items; called by the thread. Hands over without allocating memory, which may be what is lacking."""
        try:
            if not self._is_cancelled:
                for item in self._source:
                    self._items.append(item)
                    if self._is_cancelled:
                        break
        except BaseException as failure:  # raised in the thread that asks for the result
            self._failure = failure
        finally:
            self._done.release()

    def _wait(self) -> None:
        while not self._done.acquire(timeout=_CHECK_SECONDS):
            self._thread.check()
        self._done.release()


def _taken_lock() -> threading.Lock:
    """A lock that is released once, when something has happened: unlike an event, that takes no memory."""
    lock = threading.Lock()
    lock.acquire()
    return lock


def _described(failure: BaseException) -> str:
    text = str(failure)
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__
