"""Sandbox for untrusted chat templates, rendered in a child process under kernel limits.

A child that exceeds its limits is terminated, and the next conversation starts a new one. Built-in templates are
rendered in this process.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import markupsafe

from megatron.errors import ConfigError, DataError, MegatronError, printable
from megatron.tokenizers.chat import rendering
from megatron.tokenizers.chat.named import SOURCES

MOST_TEMPLATE_BYTES = 128 << 10
_SECONDS = 0.5  # processor time for a conversation, which normally takes less than a millisecond
_SECONDS_PER_PART = 0.005  # additional time for each part
_MORE_SECONDS = 30.0  # wall-clock time beyond the processor time, for a busy machine
_REPLY_BYTES = 256 << 10  # for all texts of a conversation
_REPLY_BYTES_PER_BYTE = 8  # additional bytes for each byte of the conversation
_START = "import sys; sys.path += sys.argv[1:]; import rendering; rendering.serve()"
_FOLDERS = tuple(
    str(folder)
    for folder in (
        Path(rendering.__file__).parent,
        Path(jinja2.__file__).parent.parent,
        Path(markupsafe.__file__).parent.parent,
    )
)

# A text, its length if it is a prefix of the conversation's first text, or an error.
Outcome = str | int | MegatronError


class RenderPart(NamedTuple):
    """One text to render of a conversation.

    Args:
        messages: number of messages; None leaves all variables unchanged.
        add_generation_prompt: the variable of that name.
        marks: texts before and after each `{% generation %}` block.
    """

    messages: int | None = None
    add_generation_prompt: bool = False
    marks: tuple[str, str] = ("", "")


class RenderJob(NamedTuple):
    """The texts to render of one conversation.

    Args:
        variables: of the template, JSON-serialisable.
        now: the time for `strftime_now`.
    """

    variables: Mapping[str, Any]
    now: datetime.datetime
    parts: Sequence[RenderPart]

    def plain(self) -> dict[str, Any]:
        """Returns the job as JSON for `rendering.py`."""
        return {"variables": self.variables, "now": self.now.isoformat(), "parts": self.parts}


class BoundedTemplate:
    """A compiled chat template; safe to use from several threads and in forked processes.

    Args:
        source: the Jinja program.
        name: its name in errors.

    Raises:
        ConfigError: it is too long, cannot be compiled, or no process can be started for it.
    """

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MOST_TEMPLATE_BYTES:
            raise ConfigError(
                f"{name} has {size:,} bytes; a chat template may have {MOST_TEMPLATE_BYTES:,}. Is it the right file?"
            )
        self._source = source
        self._program: rendering.TemplateProgram | None = None
        self._slot = _ChildSlot()
        reply: Mapping[str, Any]
        if source in SOURCES.values():
            self._program, reply = rendering.compiled(source)
        else:
            self._slot.child, reply = self._started()
        self.has_generation_blocks = reply.get("has_generation_blocks") is True

    def render(
        self,
        variables: Mapping[str, Any],
        now: datetime.datetime | None = None,
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """Renders the template.

        Args:
            variables: JSON-serialisable.
            now: the time for `strftime_now`; the current time by default.
            generation_marks: texts before and after each `{% generation %}` block.

        Raises:
            ConfigError: the template fails or exceeds a limit.
            DataError: it rejects the conversation (`raise_exception`).
        """
        job = RenderJob(variables, now or datetime.datetime.now(), [RenderPart(marks=generation_marks)])
        outcome = self.outcomes([job])[0][0]
        if isinstance(outcome, MegatronError):
            raise outcome
        return str(outcome)

    def outcomes(self, jobs: Sequence[RenderJob]) -> list[list[Outcome]]:
        """Renders conversations; each part has a text or an error.

        Raises:
            ConfigError: no process can be started.
        """
        if self._program is not None:
            return [list(map(self._read, self._program.outcomes(job.plain()))) for job in jobs]
        slot = self._slot
        if slot.process_id != os.getpid():  # this process was forked: child and lock belong to its parent
            slot = self._slot = _ChildSlot()
        with slot.lock:
            return self._render_in_child(slot, jobs)

    def _render_in_child(self, slot: _ChildSlot, jobs: Sequence[RenderJob]) -> list[list[Outcome]]:
        messages = [rendering.packed(job.plain()) for job in jobs]
        done: list[list[Outcome]] = []
        while len(done) < len(jobs):
            if slot.child is None or not slot.child.is_running:
                slot.child, _ = self._started()
            try:
                slot.child.send(_batch(jobs[len(done) :], messages[len(done) :]))
                while len(done) < len(jobs):
                    job, most_bytes = jobs[len(done)], _most_reply_bytes(len(messages[len(done)]))
                    done.append(self._checked(slot.child.receive(most_bytes, len(job.parts)), len(job.parts)))
            except _ChildExited as failure:
                slot.child = None
                done.append([self._exceeded(str(failure))] * len(jobs[len(done)].parts))
        return done

    def _started(self) -> tuple[_Child, Mapping[str, Any]]:
        """Starts a child, which compiles the template, and returns it with its reply."""
        try:
            child = _Child()
            child.send(rendering.packed([_seconds_for(0), self._source]))
            reply = child.receive(_REPLY_BYTES, 0)
        except OSError as failure:
            raise ConfigError(
                f"{self.name}: its rendering process cannot be started ({failure.strerror or failure}). Free memory or "
                "processes, or use a built-in chat template, which needs no process."
            ) from None
        except _ChildExited as failure:
            raise self._exceeded(str(failure)) from None
        if not isinstance(reply, dict) or "unusable" in reply:
            why = printable(reply.get("unusable") if isinstance(reply, dict) else reply, quoted=False)
            raise ConfigError(f"{self.name} cannot be used as a chat template: {why}. Use another or a built-in one.")
        if "invalid" in reply:
            line = reply.get("line")
            raise ConfigError(
                f"{self.name} is not a chat template{f', line {line}' if isinstance(line, int) else ''}: "
                f"{printable(reply['invalid'], quoted=False)}. Correct it, or use another with --chat-template."
            )
        return child, reply

    def _checked(self, reply: Any, parts: int) -> list[Outcome]:
        if not isinstance(reply, list) or len(reply) != parts:
            return [self._exceeded("its reply is invalid")] * parts
        return list(map(self._read, reply))

    def _read(self, outcome: Any) -> Outcome:
        if isinstance(outcome, (str, int)):
            return outcome
        kind, why = next(iter(outcome.items())) if isinstance(outcome, dict) and outcome else ("limit", outcome)
        if kind == "refused":
            return DataError(f"{self.name} rejects the conversation: {printable(why)}.")
        if kind == "failed":
            return ConfigError(
                f"{self.name} fails on a conversation: {printable(why, quoted=False)}. Correct the template, or use "
                "another with --chat-template."
            )
        return self._exceeded(printable(why, quoted=False))

    def _exceeded(self, why: str) -> ConfigError:
        return ConfigError(f"{self.name}: {why}. Use a simpler chat template, or a built-in one.")


class _ChildSlot:
    """The child of one process; a forked process gets a new slot."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.lock = threading.Lock()
        self.child: _Child | None = None


class _ChildExited(Exception):
    """A child exited or was terminated before its reply."""


class _Child:
    """A clean interpreter that renders one template; it exits with this object and this process.

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with contextlib.ExitStack() as undo, theirs:
            undo.callback(ours.close)
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _START, *_FOLDERS],
                stdin=theirs.fileno(),
                stdout=theirs.fileno(),
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # Ctrl-C must not reach the child
            )
            undo.pop_all()
        self._socket = ours
        self._end = weakref.finalize(self, _end, self._process, ours, os.getpid())

    @property
    def is_running(self) -> bool:
        return self._end.alive and self._process.poll() is None

    def send(self, message: bytes) -> None:
        """Sends a message.

        Raises:
            _ChildExited: the child did not read it.
        """
        with self._ending(0):
            self._socket.settimeout(_MORE_SECONDS)
            self._socket.sendall(len(message).to_bytes(8, "big") + message)

    def receive(self, most_bytes: int, parts: int) -> Any:
        """Receives the child's reply; one that is too long is rejected unread.

        Raises:
            _ChildExited: the child exceeded a limit or exited for another reason.
        """
        with self._ending(parts):
            self._socket.settimeout(_seconds_for(parts) + _MORE_SECONDS)
            length = int.from_bytes(self._read(8), "big")
            if length > most_bytes:
                raise ValueError(length)
            return rendering.unpacked(self._read(length))

    def _read(self, count: int) -> bytearray:
        content = bytearray(count)
        waiting = memoryview(content)
        while waiting:
            read = self._socket.recv_into(waiting)
            if not read:
                raise EOFError
            waiting = waiting[read:]
        return content

    @contextlib.contextmanager
    def _ending(self, parts: int) -> Iterator[None]:
        """Terminates the child on any failure, and reports the reason."""
        try:
            yield
        except TimeoutError:
            self._end()
            seconds = _seconds_for(parts) + _MORE_SECONDS
            raise _ChildExited(f"its rendering process does not reply within {seconds:g} seconds") from None
        except (ValueError, RecursionError):
            self._end()
            raise _ChildExited("its rendering process sends an invalid reply") from None
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MORE_SECONDS)
            self._end()
            raise _ChildExited(_reason(self._process.returncode, parts)) from None
        except BaseException:  # such as Ctrl-C: the pending reply is lost
            self._end()
            raise


def _end(process: subprocess.Popen[bytes], connection: socket.socket, process_id: int) -> None:
    connection.close()
    if os.getpid() != process_id:  # a copy, in a forked process
        process.returncode = 0
        return
    process.kill()
    process.wait()


def _batch(jobs: Sequence[RenderJob], messages: Sequence[bytes]) -> bytes:
    """Packs jobs into one message, each with its limits."""
    limited = (
        b"[%f,%d,%b]" % (_seconds_for(len(job.parts)), _most_reply_bytes(len(message)), message)
        for job, message in zip(jobs, messages, strict=True)
    )
    return b"[" + b",".join(limited) + b"]"


def _seconds_for(parts: int) -> float:
    return _SECONDS + _SECONDS_PER_PART * parts


def _most_reply_bytes(job_bytes: int) -> int:
    return _REPLY_BYTES + _REPLY_BYTES_PER_BYTE * job_bytes


def _reason(code: int | None, parts: int) -> str:
    if code == -signal.SIGPROF:
        return f"it takes more than {_seconds_for(parts):g} seconds"
    if code == rendering.OUT_OF_MEMORY:
        return f"it needs more than {rendering.MEMORY_BYTES >> 20} MB of memory"
    return f"its rendering process exited with {code}"
