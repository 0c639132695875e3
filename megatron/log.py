"""The only way to print.

Progress lines go to standard output, everything else to standard error. Before the mesh is open every process writes;
once `set_rank` was called, `info` and `line` speak on one rank only, while `warning` and `error` always speak and name
theirs. `copy_to` keeps a file of what this process was told to say, lines that another rank prints included.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn, TextIO

from megatron.errors import ExitCode, MegatronError

_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


@dataclass
class _Voice:
    """What this process may say: which rank it is and the least severe message it shows."""

    rank: int | None = None
    speaks_info: bool = True
    speaks_lines: bool = True
    level: int = _LEVELS["info"]
    copy: TextIO | None = None


_VOICE = _Voice()


def set_rank(rank: int, world_size: int) -> None:
    """Tells the log which rank this is: rank 0 speaks `info`, the last rank speaks `line` (upstream's habit)."""
    _VOICE.rank = rank if world_size > 1 else None
    _VOICE.speaks_info = rank == 0
    _VOICE.speaks_lines = rank == world_size - 1


def set_level(level: str) -> None:
    """Sets the least severe message shown: debug, info, warning, error or critical."""
    _VOICE.level = _LEVELS[level]


def copy_to(path: str | os.PathLike[str] | None) -> None:
    """Appends every further message to a file as well; None ends that. Meant for one rank."""
    if _VOICE.copy is not None:
        _VOICE.copy.close()
    _VOICE.copy = None if path is None else open(path, "a", encoding="utf-8", errors="backslashreplace")


def line(text: str) -> None:
    """Prints a result line to standard output, from the last rank only."""
    if _VOICE.speaks_lines:
        _write(sys.stdout, text)
    else:
        _keep(text)


def info(text: str) -> None:
    """Prints a message to standard error, from rank 0 only."""
    if _VOICE.speaks_info and _VOICE.level <= _LEVELS["info"]:
        _write(sys.stderr, text)


def debug(text: str) -> None:
    """Prints a message to standard error from rank 0, if the level is debug."""
    if _VOICE.speaks_info and _VOICE.level <= _LEVELS["debug"]:
        _write(sys.stderr, text)


def warning(text: str) -> None:
    """Prints a warning to standard error, from any rank."""
    if _VOICE.level <= _LEVELS["warning"]:
        _write(sys.stderr, f"{_rank_prefix()}warning: {text}")


def error(text: str) -> None:
    """Prints an error to standard error, from any rank."""
    _write(sys.stderr, f"{_rank_prefix()}error: {text}")


def terminal_writer() -> Callable[[str], object] | None:
    """Writes as it is, for a line that moves; None where standard error is no terminal."""
    if not sys.stderr.isatty():
        return None
    return lambda text: os.write(sys.stderr.fileno(), text.encode())


def interrupt_on_sigterm() -> None:
    """Makes SIGTERM what the keyboard's interrupt is, so that a program takes back what it began."""
    signal.signal(signal.SIGTERM, _interrupt)


class _Terminated(KeyboardInterrupt):
    """SIGTERM, which programs answer as they answer the keyboard."""


def _interrupt(number: int, frame: object) -> NoReturn:
    raise _Terminated


def exit_with(main: Callable[[], int | None]) -> NoReturn:
    """Runs an entry point and ends the process with its exit code.

    A `MegatronError` is shown as its text; anything else with its traceback. The process leaves without running exit
    handlers when it failed: a distributed one would otherwise wait there for ranks that are gone.
    """
    try:
        code = int(main() or 0)
    except MegatronError as failure:
        error(str(failure))
        code = int(failure.exit_code)
    except _Terminated:
        error("ended by SIGTERM")
        code = 128 + signal.SIGTERM
    except KeyboardInterrupt:
        error("interrupted from the keyboard")
        code = 128 + signal.SIGINT
    except Exception:
        error(traceback.format_exc())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    if code not in (ExitCode.DONE, ExitCode.USAGE):
        os._exit(code)
    sys.exit(code)


def _rank_prefix() -> str:
    return "" if _VOICE.rank is None else f"[rank {_VOICE.rank}] "


def _write(stream: TextIO, text: str) -> None:
    stream.write(text if text.endswith("\n") else text + "\n")
    stream.flush()
    _keep(text)


def _keep(text: str) -> None:
    """Adds a message to the copy; a full disk must not end training for the sake of a log."""
    if _VOICE.copy is not None:
        with contextlib.suppress(OSError):
            _VOICE.copy.write(text if text.endswith("\n") else text + "\n")
            _VOICE.copy.flush()
