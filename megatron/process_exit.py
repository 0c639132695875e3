"""Process exit: exit codes, and listeners that are notified of the error before it is printed.

`exit_with` runs and ends a program, `end_process` ends it from a thread. A program whose output pipe is closed
(`program | head`) exits silently, as with SIGPIPE.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import NoReturn

from megatron import log
from megatron.errors import ExitCode, MegatronError
from megatron.secret_text import masked

# Receives exit code and text of the error that ends this process; returns True if it prints the text.
FailureListener = Callable[[int, str], bool]

# Delay before ranks other than 0 print an error that all ranks may have: the launcher terminates them meanwhile.
_FIRST_RANK_SECONDS = 2.0
_RETRY_SECONDS = 0.05
_BROKEN_PIPE = 128 + signal.SIGPIPE
_REQUIRED_PACKAGES = frozenset(
    {"torch", "deepspeed", "numpy", "safetensors", "tokenizers", "tensorboard", "yaml", "jinja2", "orjson", "tqdm"}
)


@dataclass
class _Ending:
    """Listeners, the last reported error, and whether `exit_with` runs this process."""

    listeners: list[FailureListener] = field(default_factory=list)
    recorders: list[FailureListener] = field(default_factory=list)
    shown: BaseException | None = None
    is_program: bool = False


_ENDING = _Ending()


def interrupt_on_sigterm() -> None:
    """Handles SIGTERM like Ctrl-C, so that a program cleans up before it exits."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)


class _Terminated(KeyboardInterrupt):
    """Raised by SIGTERM."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises `_Terminated`; in a finalizer, where Python ignores exceptions, repeats the signal later."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, _RETRY_SECONDS)
            return
        frame = frame.f_back
    raise _Terminated


def on_failure(listener: FailureListener, *, only_if_shown: bool = False) -> Callable[[], None]:
    """Registers a listener for the error that ends this process; returns a function that unregisters it.

    Args:
        only_if_shown: call it only when the error is about to be printed: a launcher may end this rank before, because
            another rank had the same error.
    """
    listeners = _ENDING.recorders if only_if_shown else _ENDING.listeners
    listeners.append(listener)
    return lambda: listeners.remove(listener)


def show_failure(failure: BaseException) -> int:
    """Notifies the listeners of the error that ends this process, and prints it unless one of them does; only once.

    Returns:
        the exit code of the error.
    """
    code, text = _describe(failure)
    if _ENDING.shown is not failure:
        _ENDING.shown = failure
        if not log.is_first_rank() and isinstance(failure, MegatronError) and failure.is_on_all_ranks:
            time.sleep(_FIRST_RANK_SECONDS)  # rank 0 prints it before the launcher notices that this rank has exited
            return code
        _show(code, text, is_shown=code == _BROKEN_PIPE)
    return code


def record_failure(code: int, text: str) -> None:
    """Notifies the `only_if_shown` listeners of an error that this rank prints."""
    for recorder in list(_ENDING.recorders):
        recorder(code, text)


@contextlib.contextmanager
def showing_failures() -> Iterator[None]:
    """Prints an error that leaves the block before enclosing contexts are closed, which may wait for other ranks."""
    try:
        yield
    except Exception as failure:
        show_failure(failure)
        raise


def end_process(code: int, text: str, *, is_shown: bool = False) -> NoReturn:
    """Prints an error and ends the process, from any thread, even if the main thread is stuck.

    Args:
        is_shown: the error was already printed, or another rank prints it.
    """
    _show(code, text, is_shown=is_shown, waits_for_first=False)
    with contextlib.suppress(OSError, ValueError):
        log.flush()
    os._exit(code)


def is_program() -> bool:
    """True if `exit_with` runs this process, so that an error in its entry point ends it."""
    return _ENDING.is_program


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Runs an entry point and exits with its exit code.

    A `MegatronError` is printed as its text, any other exception with its traceback. After a failure, exit handlers do
    not run: in a distributed process they would wait for ranks that have exited.
    """
    _ENDING.is_program = True
    try:
        code = int(main() or 0)
    except (Exception, KeyboardInterrupt) as failure:
        code = show_failure(failure)
    try:
        is_flushed = log.flush()
    except BrokenPipeError:
        code, is_flushed = code or _BROKEN_PIPE, False
    if code not in (ExitCode.DONE, ExitCode.USAGE) or not is_flushed:
        os._exit(code)  # Python would end with 120 after a failed flush
    sys.exit(code)


def _describe(failure: BaseException) -> tuple[int, str]:
    """Exit code and text of the error that ends a program."""
    if isinstance(failure, MegatronError):
        return int(failure.exit_code), masked(str(failure))
    if isinstance(failure, _Terminated):
        return 128 + signal.SIGTERM, "terminated by SIGTERM"
    if isinstance(failure, KeyboardInterrupt):
        return 128 + signal.SIGINT, "interrupted from the keyboard"
    if isinstance(failure, BrokenPipeError) and log.is_reader_gone():
        return _BROKEN_PIPE, "output pipe closed"
    if isinstance(failure, ModuleNotFoundError) and failure.name in _REQUIRED_PACKAGES:
        return ExitCode.USAGE, (
            f"{failure.name} is not installed for {sys.executable}. Activate the environment of the project (after "
            "examples/quickstart.sh: source .venv/bin/activate), or install it here: pip install -e ."
        )
    return 1, masked("".join(traceback.format_exception(failure)))


def _show(code: int, text: str, *, is_shown: bool = False, waits_for_first: bool = True) -> None:
    shown_elsewhere = any([listener(code, text) for listener in list(_ENDING.listeners)]) or is_shown
    if not log.is_first_rank() and waits_for_first and not shown_elsewhere:  # the launcher may end this rank meanwhile
        time.sleep(_FIRST_RANK_SECONDS)
    if not shown_elsewhere:
        record_failure(code, text)
        log.error(text)
