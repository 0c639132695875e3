"""Starting and ending the processes of a corpus tool, and reporting their failures.

Every tool's workers behave alike: the parent handles keyboard interrupts, SIGTERM ends them, an error of
theirs arrives with its type, and one that died is named with what killed it.
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
    """A worker process died or failed; nothing of the run was published."""

    exit_code = ExitCode.STORAGE


_KINDS: tuple[type[MegatronError], ...] = (ConfigError, DataError, StorageError, WorkerError)


def usable_cores() -> int:
    """Processor cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def start_method() -> str:
    """How workers are started: forked on Linux from a process with one Python thread, else spawned."""
    return "fork" if sys.platform == "linux" and threading.active_count() == 1 else "spawn"


def start_process(
    method: str, body: Callable[..., None], words: Sequence[Any], keep: Callable[[BaseProcess], None]
) -> None:
    """Starts a worker; a forked one receives no signal while it still has this process's signal handlers.

    Args:
        method: "fork" or "spawn".
        words: arguments of `body`, which calls `enter_worker` first.
        keep: records the started process, before a signal can interrupt this one.
    """
    context = multiprocessing.get_context(method)
    process: BaseProcess = context.Process(target=body, args=tuple(words), daemon=True)  # type: ignore[attr-defined]
    if method != "fork":
        process.start()
        keep(process)
        return
    old = signal.pthread_sigmask(signal.SIG_BLOCK, _OUR_SIGNALS)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # threads of libraries, which know about forks
            process.start()
            keep(process)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def enter_worker(inherited: Iterable[Connection] = ()) -> None:
    """Makes a started process a worker.

    Args:
        inherited: the parent's pipe ends that were forked along; left open, no pipe would ever close.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends this process
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _OUR_SIGNALS)
    for end in inherited:
        end.close()
    gc.freeze()  # does not touch inherited pages, so that they stay shared


def stop_processes(processes: Iterable[BaseProcess]) -> None:
    """Ends workers, by force if need be."""
    started = list(processes)
    for process in started:
        process.terminate()
    for process in started:
        process.join(STOP_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def death_of(title: str, process: BaseProcess, workers_flag: str = "--workers") -> WorkerError:
    """The error for a worker that ended without reporting why."""
    process.join(STOP_SECONDS)
    code = process.exitcode
    how = f"was killed by {_signal_name(-code)}" if code is not None and code < 0 else f"ended with exit code {code}"
    return WorkerError(
        f"{title} {how}; nothing was published. When the system was short of memory (see dmesg), use fewer "
        f"{workers_flag}; then run the same command again."
    )


def failure_message(failure: MegatronError) -> dict[str, Any]:
    """A worker's error as a JSON message."""
    return {"failure": describe_failure(failure, _KINDS)}


def raise_failure(message: dict[str, Any]) -> None:
    """Raises the error that a worker's message describes, if it describes one."""
    if "failure" in message:
        raise rebuild_failure(message["failure"], _KINDS, WorkerError)


def _signal_name(number: int) -> str:
    try:
        return f"signal {number} ({signal.Signals(number).name})"
    except ValueError:
        return f"signal {number}"
