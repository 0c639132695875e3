"""The only way to print.

Result lines go to standard output, everything else to standard error. Before `set_rank` is called every process prints.
Afterwards one rank prints `info` and `shared_warning`, and one prints `line`; every rank prints `warning` and `error`,
with its number.
`copy_to` appends the messages of this process to a file, including result lines that another rank prints; the file
begins with the warnings since `keep_warnings`. A copy that cannot be written ends nothing; nor, after `make_optional`,
do the standard streams.
Characters that steer a terminal, which a text from a file may hold, are written as escapes.
`open_status` and `status_line` reserve the last line of a terminal for a text that changes, such as a progress bar;
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

# Control characters other than tab and line feed, marks that reverse the direction of writing, and lone surrogates,
# which no output takes. As JSON's escapes they mean the same in a line that is JSON.
_CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_ERASE = "\r\x1b[K"
_MOST_KEPT = 1000
_LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}


@dataclass
class _Status:
    """The last line of the terminal, which rank 0 draws.

    Attributes:
        is_own: whether this process draws it.
        took_lines: whether this process prints result lines only, or does not print them, because of it.
        text: what the line shows.
    """

    is_own: bool
    took_lines: bool
    text: str = ""

    def erase(self) -> None:
        """Empties the line, also where another process has drawn it."""
        if self.text or not self.is_own:
            _flush(sys.stderr, _ERASE)

    def draw(self) -> None:
        """Shows the text again below what was printed."""
        if self.text:
            _flush(sys.stderr, _ERASE + self.text)


@dataclass
class _Output:
    """What this process prints: its rank, and the lowest level shown."""

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
    """Tells the log which rank this is: rank 0 prints `info`, the last rank prints `line`, as Megatron-LM does."""
    _OUTPUT.rank = rank if world_size > 1 else None
    _OUTPUT.prints_info = rank == 0
    _OUTPUT.prints_lines = rank == world_size - 1


def is_first_rank() -> bool:
    """Whether this process is rank 0, or the only one."""
    return not _OUTPUT.rank


def set_level(level: str) -> None:
    """Sets the lowest level shown: debug, info, warning, error or critical."""
    _OUTPUT.level = _LEVELS[level]


def keep_warnings() -> None:
    """Keeps the warnings from now on for the file of the next `copy_to`."""
    _OUTPUT.kept_warnings = []


def copy_to(path: str | os.PathLike[str] | None) -> None:
    """Also appends later messages, and the warnings that were kept, to a file; None stops that. For one rank only."""
    if _OUTPUT.copy is not None:
        _OUTPUT.copy.close()
    _OUTPUT.copy = None if path is None else LogCopy(path)
    kept, _OUTPUT.kept_warnings = _OUTPUT.kept_warnings, None
    for text in kept or ():
        record(text)


def make_optional(is_optional: bool = True) -> None:
    """Keeps the program running when a standard stream cannot be written: a pipe is closed, a disk is full."""
    _OUTPUT.is_optional, _OUTPUT.lost = is_optional, 0


def warn_of_lost_output() -> None:
    """Says how many messages of this process are missing in the copy and in the standard streams, if any."""
    copy = _OUTPUT.copy
    if copy is not None and copy.lost:
        warning(f"{copy.path} lacks {copy.lost} messages ({copy.reason}).")
    if _OUTPUT.lost:
        warning(f"the standard streams lack {_OUTPUT.lost} messages ({_OUTPUT.reason}).")


def line(text: str) -> None:
    """Prints a result line to standard output, from the last rank only."""
    if _OUTPUT.prints_lines:
        _write(sys.stdout, text)
    else:
        _append(_visible(text))


def text(words: str, end: str = "\n") -> None:
    """Writes text of a corpus or a model to standard output, on whichever rank asks for it.

    On a terminal characters that steer it are written as escapes. A file or a pipe gets the text as it is.
    """
    _flush(sys.stdout, f"{_visible(words) if is_terminal('stdout') else words}{end}")


def record(text: str) -> None:
    """Adds a message to the copy alone."""
    _append(_visible(masked(text)))


def open_status(*, with_lines: bool) -> None:
    """Rank 0 draws a line below all messages on the terminal from now on; called on every rank.

    Args:
        with_lines: whether result lines go to the same terminal, so that rank 0 prints them, too.
    """
    is_own = is_first_rank()
    _OUTPUT.status = _Status(is_own, with_lines and _OUTPUT.prints_lines is not is_own)
    _OUTPUT.prints_lines ^= _OUTPUT.status.took_lines


def status(text: str) -> None:
    """Draws the line of `open_status`: one line of text, which may contain escape sequences."""
    if _OUTPUT.status is not None and _OUTPUT.status.is_own:
        _OUTPUT.status.text = text
        _OUTPUT.status.draw()


def status_line() -> Callable[[str], None] | None:
    """Draws a last line on the terminal, none if its text is empty; None where standard error is no terminal."""
    return _draw_status if is_terminal("stderr") else None


def _draw_status(text: str) -> None:
    if text:
        _OUTPUT.status = _OUTPUT.status or _Status(is_own=True, took_lines=False)
        status(text)
    elif _OUTPUT.status is not None:
        _OUTPUT.status.erase()
        _OUTPUT.status = None


def close_status() -> None:
    """Leaves the line of `open_status` on the terminal as it is, and ends it; idempotent."""
    closed, _OUTPUT.status = _OUTPUT.status, None
    if closed is not None:
        _OUTPUT.prints_lines ^= closed.took_lines
        if closed.text:
            _flush(sys.stderr, "\n")


def shows_info() -> bool:
    """Whether this process prints `info`."""
    return _OUTPUT.prints_info and _OUTPUT.level <= _LEVELS["info"]


def set_activity(text: str) -> None:
    """Says what this process is busy with from now on; `show_activity_when_quiet` shows it if it takes long."""
    _OUTPUT.activity, _OUTPUT.activity_at = text, time.monotonic()


@contextlib.contextmanager
def show_activity_when_quiet() -> Iterator[None]:
    """Shows what rank 0 is busy with when nothing was printed for 2 seconds, then for 4, 8, and so on up to a minute.

    Not while a progress bar is drawn, which shows as much.
    """
    is_over = threading.Event()
    narrator = threading.Thread(target=_break_silence, args=(is_over,), name="log", daemon=True)
    _OUTPUT.activity_at = _OUTPUT.written_at = time.monotonic()
    narrator.start()
    try:
        yield
    finally:
        is_over.set()
        narrator.join()


def _break_silence(is_over: threading.Event) -> None:
    patience, own_at = _SILENCE_SECONDS, 0.0
    while not is_over.wait(_SILENCE_SECONDS / 8):
        silent_since, now = _OUTPUT.written_at, time.monotonic()
        if silent_since != own_at:
            patience = _SILENCE_SECONDS
        if now - silent_since < patience or _OUTPUT.status is not None or not shows_info():
            continue
        seconds = now - _OUTPUT.activity_at
        _write(sys.stderr, f"... {_OUTPUT.activity}" + (f" ({seconds:.0f} s)" if seconds >= 1 else ""))
        patience, own_at = min(2 * patience, _LONGEST_SILENCE_SECONDS), _OUTPUT.written_at


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
    """Prints a warning that every rank has, from rank 0 only."""
    if _OUTPUT.prints_info:
        _warn(f"warning: {text}")


def error(text: str, rank: int | None = None) -> None:
    """Prints an error to standard error, from any rank.

    Args:
        rank: the rank whose error it is; this one if left out.
    """
    if _OUTPUT.status is not None:
        _OUTPUT.status.erase()
        _OUTPUT.status = None  # what ends the process is the last that is seen
    _write(sys.stderr, f"{_rank_prefix(rank)}error: {text}")


def flush() -> bool:
    """Writes what the standard streams hold back; whether it was written."""
    return _flush(sys.stdout) and _flush(sys.stderr)


def is_reader_gone() -> bool:
    """Whether standard output is a pipe that nobody reads any more; other pipes may break, too."""
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)
    except (AttributeError, OSError, ValueError):  # there is none, or it is no file
        return False
    return any(events & select.POLLERR for _, events in poll.poll(0))


def is_terminal(name: str) -> bool:
    """Whether a standard stream, stdout or stderr, is a terminal."""
    return bool(getattr(sys, name).isatty())


def terminal_columns(name: str) -> int:
    """The width of the terminal that a standard stream, stdout or stderr, is; 80 if it is none."""
    try:
        return os.get_terminal_size(getattr(sys, name).fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def takes_unicode(name: str) -> bool:
    """Whether a standard stream, stdout or stderr, is encoded in UTF-8."""
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
    text = _visible(text if stream is sys.stdout else masked(text))  # results are data, and shown as they are
    text = text if text.endswith("\n") else text + "\n"
    if _OUTPUT.status is not None:
        _OUTPUT.status.erase()
    _OUTPUT.lost += not _flush(stream, text)
    _OUTPUT.written_at = time.monotonic()
    if _OUTPUT.status is not None:
        _OUTPUT.status.draw()
    _append(text)


def _flush(stream: TextIO, text: str = "") -> bool:
    """Writes to a standard stream; whether it was written. Raises only if the streams are not optional."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as failure:
        if not _OUTPUT.is_optional:
            raise
        _OUTPUT.reason = failure.strerror or str(failure)
        return False
    return True


def _visible(text: str) -> str:
    return _CONTROLS.sub(lambda control: f"\\u{ord(control.group()):04x}", text)


def _append(text: str) -> None:
    """Adds a message to the copy; the first that cannot be added is a warning."""
    copy = _OUTPUT.copy
    if copy is None or copy.append(text if text.endswith("\n") else text + "\n"):
        return
    if copy.lost == 1:
        warning(f"{copy.path} cannot be written: {copy.reason}. The run continues and tries again at every message.")
