"""Reading and writing the pipes between the program and its workers; waiting reports who does not answer.

A worker may be busy with a very long document, starved by the machine, or stopped in a debugger. None of that is an
error, but the user should not have to guess why nothing moves.
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
    """Waits as long as it takes; warns after a minute of silence, then at doubling intervals, which worker has not
    answered.

    Args:
        wait: waits for a number of seconds; returns something false while nothing is ready.
        workers: titles and process ids of those that should answer.
    """
    seconds = silence = PATIENCE_SECONDS
    while not (ready := wait(seconds)):
        for title, process_id in workers:
            log.warning(f"{title} has not answered for {silence:g} seconds. {_likely_cause(process_id)}")
        seconds, silence = silence, 2 * silence
    return ready


def can_write(pipe: Connection, seconds: float) -> bool:
    """Whether a pipe takes a short message (or has lost its reader) within a number of seconds."""
    poll = select.poll()
    poll.register(pipe.fileno(), select.POLLOUT)
    return bool(poll.poll(seconds * 1000))


def write_to_pipe(pipe: Connection, data: Any, wait: Callable[[], Any] | None = None) -> None:
    """Writes bytes without a frame around them: the message before said how many there are.

    Args:
        wait: called whenever the pipe is full; without it the system waits.
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
        wait: called before each read; without it the system waits.

    Raises:
        EOFError: the other side went away.
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
            f"It is stopped, by a signal or a debugger: `kill -CONT {process_id}` lets it continue, and nothing is "
            f"lost; "
            f"`kill {process_id}` ends the run."
        )
    return "It may have a very long document, or the machine too little memory. The run continues when it answers."


def _state_of(process_id: int | None) -> str:
    """The letter that Linux gives to the state of a process; empty if unknown."""
    try:
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
