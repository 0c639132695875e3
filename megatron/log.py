"""Log output; nothing else prints.

Result lines go to standard output, everything else to standard error. Before `set_rank` is called, every process
prints. Afterwards rank 0 prints `info` and `shared_warning`, the last rank prints `line`, and every rank prints
`warning` and `error`, with its rank.
`copy_to` appends the messages of this process to a file, including result lines that another rank prints; the file
starts with the warnings since `keep_warnings`. Failures to write the copy are not errors; nor, after `make_optional`,
are failures of the standard streams.
Terminal control characters, which text from a file may contain, are escaped.
`open_status` and `status_line` reserve the last line of a terminal for a changing text, such as a progress bar;
messages appear above it.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TextIO

from megatron.files.appending import LogCopy
from megatron.secret_text import masked

_SILENCE_SECONDS, _LONGEST_SILENCE_SECONDS = 2.0, 60.0

# Control characters other than tab and line feed, bidirectional controls, and lone surrogates, which cannot be encoded.
# They are written as JSON escapes, so that a line of JSON keeps its meaning.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ERASE = "\r\x1b[K"
_MOST_KEPT = 1000
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


@dataclass
class _Status:
    """The last line of the terminal, drawn by rank 0.

    Attributes:
        is_drawn_here: this process draws it.
        toggles_lines: while it is open, this process prints result lines although it usually does not, or vice versa.
    """

    is_drawn_here: bool
    toggles_lines: bool
    text: str = ""

    def erase(self) -> None:
        """Erases the line, even if another process has drawn it."""
        if self.text or not self.is_drawn_here:
            _flush(sys.stderr, _ERASE)

    def draw(self) -> None:
        if self.text:
            _flush(sys.stderr, _ERASE + self.text)


@dataclass
class _Output:
    """The state of this process's output."""

    rank: int | None = None
    prints_info: bool = True
    prints_lines: bool = True
    level: int = _LEVELS["info"]
    copy: LogCopy | None = None
    kept_warnings: list[str] | None = None
    is_optional: bool = False
    status: _Status | None = None
    activity: str = "starting"
    activity_at: float = 0.0
    written_at: float = 0.0
    lost: int = 0
    reason: str = ""


_OUTPUT = _Output()


def set_rank(rank: int, world_size: int) -> None:
    """Sets the rank of this process: rank 0 prints `info`, the last rank prints `line`, as in Megatron-LM."""
    _OUTPUT.rank = rank if world_size > 1 else None
    _OUTPUT.prints_info = rank == 0
    _OUTPUT.prints_lines = rank == world_size - 1


def is_first_rank() -> bool:
    """True on rank 0 or in a single process."""
    return not _OUTPUT.rank


def set_level(level: str) -> None:
    """Sets the lowest level shown: debug, info, warning, error or critical."""
    _OUTPUT.level = _LEVELS[level]


def keep_warnings() -> None:
    """Keeps warnings for the file of the next `copy_to`."""
    _OUTPUT.kept_warnings = []


def copy_to(path: str | os.PathLike[str] | None) -> None:
    """Also appends kept warnings and later messages to a file; None stops copying. For one rank only."""
    if _OUTPUT.copy is not None:
        _OUTPUT.copy.close()
    _OUTPUT.copy = None if path is None else LogCopy(path)
    kept, _OUTPUT.kept_warnings = _OUTPUT.kept_warnings, None
    for text in kept or ():
        record(text)


def make_optional(is_optional: bool = True) -> None:
    """Ignores failures to write a standard stream, such as a closed pipe or a full disk."""
    _OUTPUT.is_optional, _OUTPUT.lost = is_optional, 0


def warn_of_lost_output() -> None:
    """Warns if messages of this process are missing in the copy or in the standard streams."""
    copy = _OUTPUT.copy
    if copy is not None and copy.lost:
        warning(f"{copy.lost} messages are missing in {copy.path} ({copy.reason}).")
    if _OUTPUT.lost:
        warning(f"{_OUTPUT.lost} messages are missing in the standard streams ({_OUTPUT.reason}).")


def line(text: str) -> None:
    """Prints a result line to standard output, from the last rank only."""
    if _OUTPUT.prints_lines:
        _write(sys.stdout, text)
    else:
        _append(_escaped(text))


def text(content: str, end: str = "\n") -> None:
    """Writes text of a corpus or a model to standard output, on any rank.

    Control characters are escaped on a terminal only.
    """
    _flush(sys.stdout, f"{_escaped(content) if is_terminal('stdout') else content}{end}")


def record(text: str) -> None:
    """Writes a message to the copy only."""
    _append(_escaped(masked(text)))


def open_status(*, with_lines: bool) -> None:
    """Reserves a status line below all messages on the terminal, drawn by rank 0; called on every rank.

    Args:
        with_lines: result lines go to the same terminal, so that rank 0 must print them, too.
    """
    is_first = is_first_rank()
    _OUTPUT.status = _Status(is_first, with_lines and _OUTPUT.prints_lines is not is_first)
    _OUTPUT.prints_lines ^= _OUTPUT.status.toggles_lines


def status(text: str) -> None:
    """Draws the status line: one line of text, which may contain escape sequences."""
    if _OUTPUT.status is not None and _OUTPUT.status.is_drawn_here:
        _OUTPUT.status.text = text
        _OUTPUT.status.draw()


def status_line() -> Callable[[str], None] | None:
    """Returns a function that draws the status line (none for an empty text); None if standard error is no terminal."""
    return _draw_status if is_terminal("stderr") else None


def _draw_status(text: str) -> None:
    if text:
        _OUTPUT.status = _OUTPUT.status or _Status(is_drawn_here=True, toggles_lines=False)
        status(text)
    elif _OUTPUT.status is not None:
        _OUTPUT.status.erase()
        _OUTPUT.status = None


def close_status() -> None:
    """Closes the status line, which stays on the terminal; idempotent."""
    closing, _OUTPUT.status = _OUTPUT.status, None
    if closing is not None:
        _OUTPUT.prints_lines ^= closing.toggles_lines
        if closing.text:
            _flush(sys.stderr, "\n")


def shows_info() -> bool:
    """True if this process prints `info`."""
    return _OUTPUT.prints_info and _OUTPUT.level <= _LEVELS["info"]


def set_activity(text: str) -> None:
    """Sets the current activity of this process, shown by `show_activity_when_quiet`."""
    _OUTPUT.activity, _OUTPUT.activity_at = text, time.monotonic()


@contextlib.contextmanager
def show_activity_when_quiet() -> Iterator[None]:
    """Prints the activity of rank 0 after 2 seconds without output, then after 4, 8, and so on up to a minute.

    Prints nothing while a progress bar is drawn.
    """
    is_over = threading.Event()
    thread = threading.Thread(target=_show_activity, args=(is_over,), name="log", daemon=True)
    _OUTPUT.activity_at = _OUTPUT.written_at = time.monotonic()
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _show_activity(is_over: threading.Event) -> None:
    interval, shown_at = _SILENCE_SECONDS, 0.0
    while not is_over.wait(_SILENCE_SECONDS / 8):
        quiet_since, now = _OUTPUT.written_at, time.monotonic()
        if quiet_since != shown_at:
            interval = _SILENCE_SECONDS
        if now - quiet_since < interval or _OUTPUT.status is not None or not shows_info():
            continue
        seconds = now - _OUTPUT.activity_at
        _write(sys.stderr, f"... {_OUTPUT.activity}" + (f" ({seconds:.0f} s)" if seconds >= 1 else ""))
        interval, shown_at = min(2 * interval, _LONGEST_SILENCE_SECONDS), _OUTPUT.written_at


def info(text: str) -> None:
    """Prints a message to standard error, from rank 0 only."""
    if shows_info():
        _write(sys.stderr, text)


def debug(text: str) -> None:
    """Prints a message to standard error from rank 0, if the level is debug."""
    if _OUTPUT.prints_info and _OUTPUT.level <= _LEVELS["debug"]:
        _write(sys.stderr, text)


def warning(text: str) -> None:
    """Prints a warning to standard error, from any rank."""
    _warn(f"{_rank_prefix()}warning: {text}")


def shared_warning(text: str) -> None:
    """Prints a warning common to all ranks, from rank 0 only."""
    if _OUTPUT.prints_info:
        _warn(f"warning: {text}")


def error(text: str, rank: int | None = None) -> None:
    """Prints an error to standard error, from any rank.

    Args:
        rank: the rank that raised the error; this one by default.
    """
    if _OUTPUT.status is not None:
        _OUTPUT.status.erase()
        _OUTPUT.status = None  # the error that ends the process stays the last line
    _write(sys.stderr, f"{_rank_prefix(rank)}error: {text}")


def flush() -> bool:
    """Flushes the standard streams; returns True on success."""
    return _flush(sys.stdout) and _flush(sys.stderr)


def is_reader_gone() -> bool:
    """True if standard output is a pipe whose reader has closed it."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # no standard output, or not a file
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def is_terminal(name: str) -> bool:
    """True if a standard stream, stdout or stderr, is a terminal."""
    return bool(getattr(sys, name).isatty())


def terminal_columns(name: str) -> int:
    """The width of the terminal of a standard stream, stdout or stderr; 80 if it is not a terminal."""
    try:
        return os.get_terminal_size(getattr(sys, name).fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def takes_unicode(name: str) -> bool:
    """True if the encoding of a standard stream, stdout or stderr, is UTF-8."""
    return (getattr(sys, name).encoding or "").lower().startswith("utf")


def _warn(text: str) -> None:
    if _OUTPUT.level > _LEVELS["warning"]:
        return
    kept = _OUTPUT.kept_warnings
    if kept is not None and len(kept) < _MOST_KEPT:
        kept.append(text)
    _write(sys.stderr, text)


def _rank_prefix(rank: int | None = None) -> str:
    return "" if _OUTPUT.rank is None else f"[rank {_OUTPUT.rank if rank is None else rank}] "


def _write(stream: TextIO, text: str) -> None:
    text = _escaped(text if stream is sys.stdout else masked(text))  # result lines are data
    text = text if text.endswith("\n") else text + "\n"
    if _OUTPUT.status is not None:
        _OUTPUT.status.erase()
    _OUTPUT.lost += not _flush(stream, text)
    _OUTPUT.written_at = time.monotonic()
    if _OUTPUT.status is not None:
        _OUTPUT.status.draw()
    _append(text)


def _flush(stream: TextIO, text: str = "") -> bool:
    """Writes to a standard stream; returns True on success. Raises only if the streams are not optional."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as failure:
        if not _OUTPUT.is_optional:
            raise
        _OUTPUT.reason = failure.strerror or str(failure)
        return False
    return True


def _escaped(text: str) -> str:
    return _CONTROLS.sub(lambda control: f"\\u{ord(control.group()):04x}", text)


def _append(text: str) -> None:
    """Writes a message to the copy; warns of the first failure."""
    copy = _OUTPUT.copy
    if copy is None or copy.append(text if text.endswith("\n") else text + "\n"):
        return
    if copy.lost == 1:
        warning(f"{copy.path} cannot be written: {copy.reason}. The run continues and retries with every message.")
