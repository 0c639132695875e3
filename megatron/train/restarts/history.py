"""The starts and ends of a run, kept in its --save folder, so that each start knows how earlier ones ended.

`history.jsonl` gets a line when the run starts and when it ends. Each is one write to the end of the file and is
synced; a line that a crash left incomplete is ignored. A process that is killed writes none, so the step it is at is
kept in `.run.step`, a few bytes that are overwritten at every step: not synced, they survive the process but not always
the machine. The next start reads them and writes the missing line.

Nothing here may end a run: what the file system refuses is a warning, once.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron import log, process_exit
from megatron.checkpoint.storage import Storage, read_head, read_tail
from megatron.errors import ExitCode, MegatronError, NumericsError
from megatron.files.appending import append_line

HISTORY_NAME = "history.jsonl"
STEP_NAME = ".run.step"

_TAIL_BYTES = 256 * 1024
_STEP_BYTES = 40
_LONGEST_TEXT = 300


@dataclass(frozen=True)
class Attempt:
    """One start of a run, and how it ended.

    Attributes:
        key: a random name of the start.
        resumed_step: the step of the checkpoint it was to continue from.
        settings: a digest of what decides the outcome of a step: starts that differ in it are not comparable.
        passes: the steps before which a batch was passed over; one entry for each batch.
        at: date and time of the start, for people.
        has_ended: whether its end is known.
        step: the step it was training when it ended; None if unknown, or if it did not come that far.
        code: its exit code; None if it was killed.
        text: the first line of its error.
        was_asked: whether the end was requested, by flags or by a signal, or was the end of training.
        blames_step: whether the error itself named the step, so that its batch may be the cause.
    """

    key: str
    resumed_step: int
    settings: str = ""
    passes: tuple[int, ...] = ()
    at: str = ""
    has_ended: bool = False
    step: int | None = None
    code: int | None = None
    text: str = ""
    was_asked: bool = False
    blames_step: bool = False

    def __str__(self) -> str:
        place = "before training" if self.step is None else f"at iteration {self.step}"
        how = "killed without a message (by the system for lack of memory?)"
        if self.code is not None:
            how = f"exit code {self.code}" + (f": {self.text}" if self.text else "")
        return f"{self.at}: from iteration {self.resumed_step}, ended {place}, {how}"


class RestartHistory:
    """The history of a run; does nothing until `open` is called, which only global rank 0 does.

    All methods but `ended` are for the main thread.
    """

    def __init__(self) -> None:
        self._directory: Path | None = None
        self._run_id = ""
        self._key = ""
        self._step: int | None = None
        self._marker: int | None = None
        self._in_loop = False
        self._ending = threading.Lock()
        self._warned = False

    def open(self, directory: Path, run_id: str) -> list[Attempt]:
        """Reads the earlier starts of a run, oldest first, and writes the end of one that could not."""
        self._directory, self._run_id = directory, run_id
        attempts = read_attempts(directory, run_id)
        if attempts and not attempts[-1].has_ended:
            killed = attempts[-1]
            step = _marked_step(directory, killed.key)
            attempts[-1] = dataclasses.replace(killed, has_ended=True, step=step)
            self._append("end", killed.key, {"step": step, "code": None, "text": "", "asked": False})
        return attempts

    def started(self, resumed_step: int, settings: str, passes: Sequence[int], version: str) -> None:
        """Records that this start was not refused.

        Args:
            resumed_step, settings, passes: as in `Attempt`.
            version: the version of the program.
        """
        if self._directory is None:
            return
        self._key = secrets.token_hex(8)
        entries = {"resumed_step": resumed_step, "settings": settings, "passes": list(passes), "version": version}
        self._append("start", self._key, {**entries, "process": os.getpid()})

    def training_begins(self, step: int) -> None:
        """Records that training begins with a step; from here on an end counts."""
        if self._key and self._directory is not None:
            path = self._directory / STEP_NAME
            try:
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
                self._marker = os.open(path, flags, 0o666)
            except OSError as failure:
                self._warn(path, failure)
        self.at(step)
        self._in_loop = True

    def training_ends(self) -> None:
        """Notes that no step follows."""
        self._in_loop = False

    def at(self, step: int) -> None:
        """Notes that training of a step begins; costs one write of a few bytes."""
        self._step = step
        if self._marker is None:
            return
        try:
            os.pwrite(self._marker, _marked(self._key, step), 0)
        except OSError as failure:
            self._close()
            self._warn(Path(STEP_NAME), failure)

    def ended(self, step: int | None, code: int, text: str = "", *, asked: bool | None = None) -> None:
        """Records the end of this start; of several calls the first one counts. Any thread may call it.

        Writes and syncs one line, which takes as long as the file system takes.

        Args:
            step: the step whose result is the error; None for the step last given to `at`.
            code: the exit code that the process ends with.
            text: the error; its first line is kept.
            asked: whether the end was intended; by default success and signals that were obeyed are. An end in the
                middle of a step, because another rank was lost, is not.
        """
        if not self._key or not self._ending.acquire(blocking=False):
            return
        if asked is None:
            asked = code == ExitCode.DONE or (code == ExitCode.REQUEUE and not (text and self._in_loop))
        first_line = _shown(text.strip().partition("\n")[0])
        reached, blamed = (self._step, {}) if step is None else (step, {"blamed": True})
        self._append(
            "end", self._key, {"step": reached, "code": int(code), "text": first_line, "asked": asked, **blamed}
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records what ends the process within the block: an exception that leaves it, or another thread."""
        forget = process_exit.on_failure(self._note_failure)
        try:
            yield
        except BaseException as failure:
            is_interrupt = isinstance(failure, KeyboardInterrupt)
            code = 128 + signal.SIGINT if is_interrupt else 1
            if isinstance(failure, MegatronError):
                code = int(failure.exit_code)
            text = str(failure) or type(failure).__name__
            step = failure.step if isinstance(failure, NumericsError) else None
            self.ended(step, code, text, asked=is_interrupt)
            raise
        finally:
            forget()
            self._close()

    def _note_failure(self, code: int, text: str) -> bool:
        self.ended(None, code, text)
        return False

    def _append(self, event: str, key: str, entries: Mapping[str, Any]) -> None:
        if self._directory is None:
            return
        path = self._directory / HISTORY_NAME
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        line = json.dumps({"event": event, "run_id": self._run_id, "start": key, "at": at, **entries})
        try:
            append_line(path, line, durable=True)
        except OSError as failure:
            self._warn(path, failure)

    def _warn(self, path: Path, failure: OSError) -> None:
        if not self._warned:
            self._warned = True
            log.warning(f"{path} cannot be written: {failure.strerror or failure}. Repeated failures go unnoticed.")

    def _close(self) -> None:
        if self._marker is not None:
            os.close(self._marker)
            self._marker = None


def read_attempts(directory: Path, run_id: str) -> list[Attempt]:
    """The starts of a run that the end of a folder's history records, oldest first; none if it cannot be read."""
    attempts: dict[str, Attempt] = {}
    for line in _last_lines(directory / HISTORY_NAME):
        try:
            value = json.loads(line)
        except (ValueError, RecursionError):
            continue  # torn by a crash
        if isinstance(value, dict) and value.get("run_id") == run_id:
            _add(value, attempts)
    return list(attempts.values())


def _add(value: Mapping[str, Any], attempts: dict[str, Attempt]) -> None:
    """Adds the contents of a line; a line with a wrong entry is ignored."""
    match value:
        case {"event": "start", "start": str(key), "resumed_step": step, "passes": list(passes)}:
            if all(map(_is_count, (step, *passes))):
                settings, at = _shown(value.get("settings")), _shown(value.get("at"))
                attempts[key] = Attempt(key, step, settings, tuple(passes), at)
        case {"event": "end", "start": str(key), "step": step} if key in attempts and not attempts[key].has_ended:
            if step is None or _is_count(step):
                code = value.get("code")
                attempts[key] = dataclasses.replace(
                    attempts[key],
                    has_ended=True,
                    step=step,
                    code=code if _is_count(code) else None,
                    text=_shown(value.get("text")),
                    was_asked=value.get("asked") is True,
                    blames_step=value.get("blamed") is True,
                )


def _last_lines(path: Path) -> list[bytes]:
    """The whole lines in the last part of a file, of bounded size."""
    try:
        content = read_tail(Storage(), path, _TAIL_BYTES + 1)
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as failure:
        log.warning(f"{path} cannot be read ({failure.strerror or failure}): earlier failures of this run are unknown")
        return []
    lines = content.split(b"\n")
    return lines if len(content) <= _TAIL_BYTES else lines[1:]


def _marked(key: str, step: int) -> bytes:
    return f"{key} {step:d}".encode().ljust(_STEP_BYTES - 1) + b"\n"


def _marked_step(directory: Path, key: str) -> int | None:
    """The step that a start noted last; None if it noted none."""
    try:
        content = read_head(Storage(), directory / STEP_NAME, _STEP_BYTES)
    except OSError:
        return None
    words = content.split() if len(content) == _STEP_BYTES else []
    return int(words[1]) if len(words) == 2 and words[0] == key.encode() and words[1].isdigit() else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _shown(value: Any) -> str:
    """A text that is safe to show on a terminal; control characters become question marks."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value or "")[:_LONGEST_TEXT])
