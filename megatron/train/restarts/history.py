"""The history of starts of a run, in its --save folder.

`history.jsonl` gets a synced line at each start and end of the run; an incomplete line after a crash is ignored. A
process that is killed writes no line, so its current step is stored in `.run.step`, a few bytes that are overwritten at
every step: they are not synced, and survive a kill of the process but not always a crash of the machine. The next start
reads them and writes the missing line.

Nothing here may end a run: file system errors are a single warning.
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
        key: a random id of the start.
        resumed_step: the step of the checkpoint it resumed from.
        settings: a digest of everything that affects the outcome of a step; starts are comparable only if it is equal.
        batch_skips: the steps before which a batch was skipped, one entry per batch.
        at: date and time of the start.
        has_ended: its end is known.
        step: the step it was training when it ended; None if unknown, or before training.
        code: its exit code; None if it was killed.
        text: the first line of its error.
        was_requested: the end was requested by flags or a signal, or was the end of training.
        blames_step: the error named the step, so that its batch may be the cause.
    """

    key: str
    resumed_step: int
    settings: str = ""
    batch_skips: tuple[int, ...] = ()
    at: str = ""
    has_ended: bool = False
    step: int | None = None
    code: int | None = None
    text: str = ""
    was_requested: bool = False
    blames_step: bool = False

    def __str__(self) -> str:
        point = "before training" if self.step is None else f"at iteration {self.step}"
        reason = "killed without a message (out of memory?)"
        if self.code is not None:
            reason = f"exit code {self.code}" + (f": {self.text}" if self.text else "")
        return f"{self.at}: from iteration {self.resumed_step}, ended {point}, {reason}"


class RestartHistory:
    """The history of a run; inactive until `open`, which only global rank 0 calls.

    All methods except `ended` are for the main thread.
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
        """Reads the earlier starts of a run, oldest first, and writes the end of one that was killed."""
        self._directory, self._run_id = directory, run_id
        attempts = read_attempts(directory, run_id)
        if attempts and not attempts[-1].has_ended:
            killed = attempts[-1]
            step = _marked_step(directory, killed.key)
            attempts[-1] = dataclasses.replace(killed, has_ended=True, step=step)
            self._append("end", killed.key, {"step": step, "code": None, "text": "", "asked": False})
        return attempts

    def started(self, resumed_step: int, settings: str, batch_skips: Sequence[int], version: str) -> None:
        """Records this start.

        Args:
            resumed_step, settings, batch_skips: see `Attempt`.
            version: the version of the program.
        """
        if self._directory is None:
            return
        self._key = secrets.token_hex(8)
        entries = {"resumed_step": resumed_step, "settings": settings, "passes": list(batch_skips), "version": version}
        self._append("start", self._key, {**entries, "process": os.getpid()})

    def training_begins(self, step: int) -> None:
        """Records the first step of training; an end counts from now on."""
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
        self._in_loop = False

    def at(self, step: int) -> None:
        """Records the current step, with one write of a few bytes."""
        self._step = step
        if self._marker is None:
            return
        try:
            os.pwrite(self._marker, _marked(self._key, step), 0)
        except OSError as failure:
            self._close()
            self._warn(Path(STEP_NAME), failure)

    def ended(self, step: int | None, code: int, text: str = "", *, requested: bool | None = None) -> None:
        """Records the end of this start with a synced line; only the first call counts. Any thread may call it.

        Args:
            step: the step that caused the error; None for the step last given to `at`.
            code: the exit code of the process.
            text: the error; only its first line is kept.
            requested: the end was requested; by default true for success and handled signals, but not for an end in the
                middle of a step, because another rank was lost.
        """
        if not self._key or not self._ending.acquire(blocking=False):
            return
        if requested is None:
            requested = code == ExitCode.DONE or (code == ExitCode.REQUEUE and not (text and self._in_loop))
        first_line = _shown(text.strip().partition("\n")[0])
        reached, blamed = (self._step, {}) if step is None else (step, {"blamed": True})
        self._append(
            "end", self._key, {"step": reached, "code": int(code), "text": first_line, "asked": requested, **blamed}
        )

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Records an end of the process within the block, by an exception or by another thread."""
        unregister = process_exit.on_failure(self._note_failure)
        try:
            yield
        except BaseException as failure:
            is_interrupt = isinstance(failure, KeyboardInterrupt)
            code = 128 + signal.SIGINT if is_interrupt else 1
            if isinstance(failure, MegatronError):
                code = int(failure.exit_code)
            text = str(failure) or type(failure).__name__
            step = failure.step if isinstance(failure, NumericsError) else None
            self.ended(step, code, text, requested=is_interrupt)
            raise
        finally:
            unregister()
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
            log.warning(f"{path} cannot be written: {failure.strerror or failure}. Repeated failures are not detected.")

    def _close(self) -> None:
        if self._marker is not None:
            os.close(self._marker)
            self._marker = None


def read_attempts(directory: Path, run_id: str) -> list[Attempt]:
    """The recorded starts of a run, oldest first; empty if the history cannot be read."""
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
    """Adds the contents of a line; a line with an invalid entry is ignored."""
    match value:
        case {"event": "start", "start": str(key), "resumed_step": step, "passes": list(skips)}:
            if all(map(_is_count, (step, *skips))):
                settings, at = _shown(value.get("settings")), _shown(value.get("at"))
                attempts[key] = Attempt(key, step, settings, tuple(skips), at)
        case {"event": "end", "start": str(key), "step": step} if key in attempts and not attempts[key].has_ended:
            if step is None or _is_count(step):
                code = value.get("code")
                attempts[key] = dataclasses.replace(
                    attempts[key],
                    has_ended=True,
                    step=step,
                    code=code if _is_count(code) else None,
                    text=_shown(value.get("text")),
                    was_requested=value.get("asked") is True,
                    blames_step=value.get("blamed") is True,
                )


def _last_lines(path: Path) -> list[bytes]:
    """The complete lines at the end of a file, up to a bounded size."""
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
    """The step last recorded by a start; None if there is none."""
    try:
        content = read_head(Storage(), directory / STEP_NAME, _STEP_BYTES)
    except OSError:
        return None
    fields = content.split() if len(content) == _STEP_BYTES else []
    return int(fields[1]) if len(fields) == 2 and fields[0] == key.encode() and fields[1].isdigit() else None


def _is_count(value: Any) -> bool:
    return type(value) is int and value >= 0


def _shown(value: Any) -> str:
    """A text with question marks instead of control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in str(value or "")[:_LONGEST_TEXT])
