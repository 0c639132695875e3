"""The one thread of a run that reads data ahead, and how requests and results change hands."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

from megatron import log
from megatron.errors import StorageError

Item = TypeVar("Item")

_CLOSE_SECONDS = 10.0
_CHECK_SECONDS = 0.5  # between two looks at whether the thread still runs


class ReadAhead:
    """A thread that turns iterables into lists, one after the other, in the order they were submitted.

    It starts with the first request. If no thread can be started, a warning says so once, and every request is refused
    from then on. It is a daemon, unlike the threads of an executor: one that is stuck in a read does not keep the
    program from ending.
    """

    def __init__(self) -> None:
        self._requests: SimpleQueue[PendingRead[Any] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="read-ahead", daemon=True)
        self._is_usable = True
        self._failure: BaseException | None = None

    def submit(self, source: Iterable[Item]) -> PendingRead[Item] | None:
        """Starts reading `source` in the thread; None if there is no thread to read it."""
        if self._is_usable and self._thread.ident is None:
            self._start()
        if not self._is_usable:
            return None
        reading = PendingRead(self, source)
        self._requests.put(reading)
        return reading

    def close(self) -> None:
        """Ends the thread after the reading it is at; one that is stuck in a read is left behind with a warning."""
        if self._thread.ident is None or not self._is_usable:
            return
        self._is_usable = False
        self._requests.put(None)
        self._thread.join(_CLOSE_SECONDS)
        if self._thread.is_alive():
            log.warning(f"the thread that reads data ahead did not end within {_CLOSE_SECONDS:g} s and is left behind.")

    def check(self) -> None:
        """Checks that the thread still runs.

        Raises:
            StorageError: it ended.
        """
        if self._thread.is_alive():
            return
        reason = "without an error" if self._failure is None else f"with {_described(self._failure)}"
        raise StorageError(
            f"The thread that reads data ahead ended {reason}. Free memory if that is what it lacked, or read without "
            "it (--num-workers 0); then resume from the last checkpoint (--load)."
        ) from self._failure

    def _start(self) -> None:
        try:
            self._thread.start()
        except (RuntimeError, MemoryError) as failure:
            self._is_usable = False
            log.warning(
                f"no thread could be started to read data ahead ({str(failure) or type(failure).__name__}): batches "
                "are read when they are needed, which may be slower. Raise the limits on memory and processes, or give "
                "--num-workers 0."
            )

    def _serve(self) -> None:
        try:
            while (reading := self._requests.get()) is not None:
                reading.read()
        except BaseException as failure:  # raised where the next result is asked for
            self._failure = failure


class PendingRead(Generic[Item]):
    """An iterable that is being read by the thread."""

    def __init__(self, thread: ReadAhead, source: Iterable[Item]) -> None:
        self._thread = thread
        self._source = source
        self._future: Future[list[Item]] = Future()
        self._is_abandoned = False

    def result(self) -> list[Item]:
        """Waits for the items.

        Raises:
            StorageError: the thread ended, or ran out of memory.
            Exception: what reading raised.
        """
        self._wait()
        failure = self._future.exception()
        if failure is None:
            return self._future.result()
        if isinstance(failure, Exception) and not isinstance(failure, MemoryError):
            raise failure
        raise StorageError(
            f"Reading data ahead failed with {_described(failure)}. Free memory if that is what it lacked, or "
            "read without a thread (--num-workers 0); then resume from the last checkpoint (--load)."
        ) from failure

    def cancel(self) -> None:
        """Abandons the rest and waits until the thread no longer uses the source.

        Raises:
            StorageError: the thread ended.
        """
        self.abandon()
        self._wait()

    def abandon(self) -> None:
        """Abandons the rest without waiting."""
        self._is_abandoned = True

    def read(self) -> None:
        """Reads the items; called by the thread."""
        items: list[Item] = []
        try:
            for item in () if self._is_abandoned else self._source:
                items.append(item)
                if self._is_abandoned:
                    break
        except BaseException as failure:  # raised in the thread that asks for the result
            self._future.set_exception(failure)
        else:
            self._future.set_result(items)

    def _wait(self) -> None:
        while not wait([self._future], _CHECK_SECONDS).done:
            self._thread.check()


def _described(failure: BaseException) -> str:
    text = str(failure)
    return f"{type(failure).__name__}: {text}" if text else type(failure).__name__
