"""Reads and writes the pipes between the program and its workers; long waits are reported.

A worker may be busy with a very long document, starved by the machine, or stopped in a debugger. That is not an error,
but the user should learn the reason.
"""

from __future__ import annotations

import os
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

from megatron import log
from megatron.files.exact import read_into, write_all

PATIENCE_SECONDS = 60.0

Ready = TypeVar("Ready")


def wait_for(wait: Callable[[float], Ready], workers: Sequence[tuple[str, int | None]]) -> Ready:
    """Waits without limit; logs the unresponsive workers after a minute, then at doubling intervals.

    Args:
        wait: waits for a number of seconds; returns a false value while nothing is ready.
        workers: titles and process ids of the workers that should respond.
    """
    seconds = silence = PATIENCE_SECONDS
    while not (ready := wait(seconds)):
        for title, process_id in workers:
            log.warning(f"{title} has not responded for {silence:g} seconds. {_likely_cause(process_id)}")
        seconds, silence = silence, 2 * silence
    return ready


def can_write(pipe: Connection, seconds: float) -> bool:
    """Returns True if a pipe accepts a short message (or has lost its reader) within a number of seconds."""
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def write_to_pipe(pipe: Connection, data: Any, wait: Callable[[], Any] | None = None) -> None:
    """Writes bytes without a frame: the previous message contains their number.

    Args:
        wait: called whenever the pipe is full; without it, writes block.
    """

    def write(rest: memoryview, done: int) -> int:
        while True:
            if wait is not None:
                wait()
            with suppress(BlockingIOError):
                return os.write(pipe.fileno(), rest)

    if wait is not None:
        os.set_blocking(pipe.fileno(), False)
    try:
        write_all(write, data)
    finally:
        if wait is not None:
            os.set_blocking(pipe.fileno(), True)


def read_from_pipe(pipe: Connection, size: int, wait: Callable[[], Any] | None = None) -> bytearray:
    """Reads exactly `size` bytes.

    Args:
        wait: called before each read; without it, reads block.

    Raises:
        EOFError: the other side closed the pipe.
    """

    def read(rest: memoryview, done: int) -> int:
        if wait is not None:
            wait()
        return os.readv(pipe.fileno(), [rest])

    data = bytearray(size)
    if read_into(read, memoryview(data)) < size:
        raise EOFError("the pipe was closed")
    return data


def _likely_cause(process_id: int | None) -> str:
    if _state_of(process_id) in ("T", "t"):
        return (
            f"It is stopped by a signal or a debugger: `kill -CONT {process_id}` continues it without loss, "
            f"`kill {process_id}` terminates the run."
        )
    return "It may be busy with a long document, or the machine is short of memory. The run continues once it responds."


def _state_of(process_id: int | None) -> str:
    """Returns Linux's letter for the state of a process; empty if unknown."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
