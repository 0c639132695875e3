"""How a process ends: its exit code, and who is told of the error that was the reason before it is shown.

`exit_with` ends a program, and `end_process` ends it from a thread. A program whose reader went away (`program | head`)
ends without a word, as one that SIGPIPE ends.
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

# Receives exit code and text of the error that ends this process; returns whether it shows the text.
FailureListener = Callable[[int, str], bool]

# How long another rank than 0 waits before it shows an error that all ranks may have: the launcher ends it meanwhile.
_FIRST_RANK_SECONDS = 2.0
_AGAIN_SECONDS = 0.05
_READER_IS_GONE = 128 + signal.SIGPIPE
_REQUIRED_PACKAGES = frozenset(
    {"torch", "deepspeed", "numpy", "safetensors", "tokenizers", "tensorboard", "yaml", "jinja2", "orjson", "tqdm"}
)


@dataclass
class _Ending:
    """Who is told of an error, the error that was told of last, and whether `exit_with` runs this process."""

    listeners: list[FailureListener] = field(default_factory=list)
    recorders: list[FailureListener] = field(default_factory=list)
    shown: BaseException | None = None
    is_program: bool = False


_ENDING = _Ending()


def interrupt_on_sigterm() -> None:
    """Handles SIGTERM like Ctrl-C, so that a program cleans up before it ends."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGALRM, _interrupt)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C."""


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Raises, but not inside a finalizer, where Python would drop the exception: there the signal comes again."""
    while frame is not None:
        if frame.f_code.co_name == "__del__":
            signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS)
            return
        frame = frame.f_back
    raise _Terminated


def on_failure(listener: FailureListener, *, only_if_shown: bool = False) -> Callable[[], None]:
    """Registers a listener for the error that ends this process; the function that is returned removes it.

    Args:
        only_if_shown: call it when the error is about to be shown, not at once: a launcher may end this rank first,
            because another one had the same error.
    """
    listeners = _ENDING.recorders if only_if_shown else _ENDING.listeners
    listeners.append(listener)
    return lambda: listeners.remove(listener)


def show_failure(failure: BaseException) -> int:
    """Tells the listeners of the error that ends this process, and shows it unless one of them does; only once.

    Returns:
        the exit code that belongs to the error.
    """
    code, text = _describe(failure)
    if _ENDING.shown is not failure:
        _ENDING.shown = failure
        if not log.is_first_rank() and isinstance(failure, MegatronError) and failure.is_on_all_ranks:
            time.sleep(_FIRST_RANK_SECONDS)  # rank 0 shows it before the launcher notices this rank
            return code
        _show(code, text, is_shown=code == _READER_IS_GONE)
    return code


def record_failure(code: int, text: str) -> None:
    """Tells those who registered with `only_if_shown` of an error that this rank shows, its own or another's."""
    for recorder in list(_ENDING.recorders):
        recorder(code, text)


@contextlib.contextmanager
def showing_failures() -> Iterator[None]:
    """Shows an error that leaves the block before what encloses the block is closed, which may wait for other ranks."""
    try:
        yield
    except Exception as failure:
        show_failure(failure)
        raise


def end_process(code: int, text: str, *, is_shown: bool = False) -> NoReturn:
    """Ends the process from any thread, even if the main thread is stuck, after showing why.

    Args:
        is_shown: the error has been shown, or another rank shows it.
    """
    _show(code, text, is_shown=is_shown, waits_for_first=False)
    with contextlib.suppress(OSError, ValueError):
        log.flush()
    os._exit(code)


def is_program() -> bool:
    """Whether `exit_with` runs this process, so that an error that leaves its entry point ends it."""
    return _ENDING.is_program


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Runs an entry point and ends the process with its exit code.

    A `MegatronError` is shown as its text, anything else with its traceback. A process that failed ends without running
    exit handlers: there a distributed one would wait for ranks that have ended.
    """
    _ENDING.is_program = True
    try:
        code = int(main() or 0)
    except (Exception, KeyboardInterrupt) as failure:
        code = show_failure(failure)
    try:
        is_flushed = log.flush()
    except BrokenPipeError:
        code, is_flushed = code or _READER_IS_GONE, False
    if code not in (ExitCode.DONE, ExitCode.USAGE) or not is_flushed:
        os._exit(code)  # Python would end with 120 after a failed flush
    sys.exit(code)


def _describe(failure: BaseException) -> tuple[int, str]:
    """Exit code and text of the error that ends a program."""
    if isinstance(failure, MegatronError):
        return int(failure.exit_code), masked(str(failure))
    if isinstance(failure, _Terminated):
        return 128 + signal.SIGTERM, "ended by SIGTERM"
    if isinstance(failure, KeyboardInterrupt):
        return 128 + signal.SIGINT, "interrupted from the keyboard"
    if isinstance(failure, BrokenPipeError) and log.is_reader_gone():
        return _READER_IS_GONE, "nobody reads the output any more"
    if isinstance(failure, ModuleNotFoundError) and failure.name in _REQUIRED_PACKAGES:
        return ExitCode.USAGE, (
            f"{failure.name} is not installed for {sys.executable}. Use the environment that the project is installed "
            "in (after examples/quickstart.sh: source .venv/bin/activate), or install it here: pip install -e ."
        )
    return 1, masked("".join(traceback.format_exception(failure)))


def _show(code: int, text: str, *, is_shown: bool = False, waits_for_first: bool = True) -> None:
    shown_elsewhere = any([listener(code, text) for listener in list(_ENDING.listeners)]) or is_shown
    if not log.is_first_rank() and waits_for_first and not shown_elsewhere:  # the launcher may end this rank before
        time.sleep(_FIRST_RANK_SECONDS)
    if not shown_elsewhere:
        record_failure(code, text)
        log.error(text)
