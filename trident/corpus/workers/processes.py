"""Starts and stops the processes of a corpus tool, and reports their failures.

The workers of all tools behave alike: the parent handles keyboard interrupts, SIGTERM terminates them, their errors
arrive with their type, and an unexpected exit is reported with its cause.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from megatron.errors import (
    ConfigError,
    DataError,
    ExitCode,
    MegatronError,
    StorageError,
    describe_failure,
    rebuild_failure,
)

STOP_SECONDS = 2.0
_OUR_SIGNALS = frozenset({signal.SIGINT, signal.SIGTERM})


class WorkerError(MegatronError):
    """A worker process exited unexpectedly or failed; nothing of the run was published."""

    exit_code = ExitCode.STORAGE


_KINDS: tuple[type[MegatronError], ...] = (ConfigError, DataError, StorageError, WorkerError)


def usable_cores() -> int:
    """Returns the number of processor cores available to this process."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_method() -> str:
    """Returns the start method: fork on Linux from a process with one Python thread, else spawn."""
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"


def start_process(
    method: str, body: Callable[..., None], arguments: Sequence[Any], keep: Callable[[BaseProcess], None]
) -> None:
    """Starts a worker; a forked one receives no signal while it still has this process's signal handlers.

    Args:
        method: "fork" or "spawn".
        arguments: of `body`, which calls `enter_worker` first.
        keep: records the started process, before a signal can interrupt this one.
    """
    context = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=body, args=tuple(arguments), daemon=True)  # type: ignore[attr-defined]
    if method != "fork":
        process.start()
        keep(process)
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, _OUR_SIGNALS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries, which handle forks
            process.start()
            keep(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def enter_worker(inherited: Iterable[Connection] = ()) -> None:
    """Turns a started process into a worker.

    Args:
        inherited: the parent's pipe ends, inherited by a fork; left open, no pipe would ever close.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent receives it, too, and terminates this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUR_SIGNALS)
    for end in inherited:
        end.close()
    gc.freeze()  # does not touch inherited pages, so that they stay shared


def stop_processes(processes: Iterable[BaseProcess]) -> None:
    """Stops workers, by force if necessary."""
    started = list(processes)
    for process in started:
        process.terminate()
    for process in started:
        process.join(STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def exit_error(title: str, process: BaseProcess, workers_flag: str = "--workers") -> WorkerError:
    """Returns the error for a worker that exited without a report."""
    process.join(STOP_SECONDS)
    code = process.exitcode
    how = f"was killed by {_signal_name(-code)}" if code is not None and code < 0 else f"exited with code {code}"
    return WorkerError(
        f"{title} {how}; nothing was published. If the system was short of memory (see dmesg), use fewer "
        f"{workers_flag}; then run the same command again."
    )


def failure_message(failure: MegatronError) -> dict[str, Any]:
    """Returns a worker's error as a JSON message."""
    return {"failure": describe_failure(failure, _KINDS)}


def raise_failure(message: dict[str, Any]) -> None:
    """Raises the error in a worker's message, if any."""
    if "failure" in message:
        raise rebuild_failure(message["failure"], _KINDS, WorkerError)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
