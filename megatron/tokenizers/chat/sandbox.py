"""Chat templates of unknown origin, rendered in a child process that the kernel holds to its limits.

A template that exceeds them costs its child, and the next conversation gets a new one. The project's own templates are
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
_SECONDS = 0.5  # of computing for a conversation, which takes less than a millisecond
_SECONDS_PER_PART = 0.005  # more, of one that is written in many parts
_MORE_SECONDS = 30.0  # a child may take beyond its processor time, on a machine that is busy
_REPLY_BYTES = 256 << 10  # of all texts of a conversation, and
_REPLY_BYTES_PER_BYTE = 8  # more for each byte of it
_START = "import sys; sys.path += sys.argv[1:]; import rendering; rendering.serve()"
_FOLDERS = tuple(
    str(folder)
    for folder in (
        Path(rendering.__file__).parent,
        Path(jinja2.__file__).parent.parent,
        Path(markupsafe.__file__).parent.parent,
    )
)

# A text; how long it is, where it is a beginning of the first text of its conversation; or why there is none.
Outcome = str | int | MegatronError


class RenderPart(NamedTuple):
    """One text that is wanted of a conversation.

    Args:
        messages: how many of the first ones; None leaves all variables as they are.
        add_generation_prompt: the variable of that name.
        marks: what is written before and after each `{% generation %}` block.
    """

    messages: int | None = None
    add_generation_prompt: bool = False
    marks: tuple[str, str] = ("", "")


class RenderJob(NamedTuple):
    """The texts that are wanted of one conversation.

    Args:
        variables: of the template, as JSON knows them.
        now: the time that `strftime_now` shows.
    """

    variables: Mapping[str, Any]
    now: datetime.datetime
    parts: Sequence[RenderPart]

    def plain(self) -> dict[str, Any]:
        """What `rendering.py` reads."""
        return {"variables": self.variables, "now": self.now.isoformat(), "parts": self.parts}


class BoundedTemplate:
    """A compiled chat template; safe to use from several threads, and in processes that are forked from this one.

    Args:
        source: the Jinja program.
        name: what it is called in errors.

    Raises:
        ConfigError: it is too long, cannot be compiled, or no process can be started for it.
    """

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MOST_TEMPLATE_BYTES:
            raise ConfigError(
                f"{name} holds {size:,} bytes; a chat template may hold {MOST_TEMPLATE_BYTES:,}. Is it the right file?"
            )
        self._source = source
        self._program: rendering.TemplateProgram | None = None
        self._seat = _Seat()
        reply: Mapping[str, Any]
        if source in SOURCES.values():
            self._program, reply = rendering.compiled(source)
        else:
            self._seat.child, reply = self._started()
        self.has_generation_blocks = reply.get("has_generation_blocks") is True

    def render(
        self,
        variables: Mapping[str, Any],
        now: datetime.datetime | None = None,
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """What the template writes.

        Args:
            variables: as JSON knows them.
            now: the time that `strftime_now` shows; the clock's if left out.
            generation_marks: what is written before and after each `{% generation %}` block.

        Raises:
            ConfigError: the template fails or exceeds a limit.
            DataError: it refuses the conversation (`raise_exception`).
        """
        job = RenderJob(variables, now or datetime.datetime.now(), [RenderPart(marks=generation_marks)])
        outcome = self.outcomes([job])[0][0]
        if isinstance(outcome, MegatronError):
            raise outcome
        return str(outcome)

    def outcomes(self, jobs: Sequence[RenderJob]) -> list[list[Outcome]]:
        """What the template writes of some conversations; each part has its text, or its error.

        Raises:
            ConfigError: no process can be started.
        """
        if self._program is not None:
            return [list(map(self._read, self._program.outcomes(job.plain()))) for job in jobs]
        seat = self._seat
        if seat.process_id != os.getpid():  # this process was forked: child and lock belong to the one it came from
            seat = self._seat = _Seat()
        with seat.lock:
            return self._ask(seat, jobs)

    def _ask(self, seat: _Seat, jobs: Sequence[RenderJob]) -> list[list[Outcome]]:
        messages = [rendering.packed(job.plain()) for job in jobs]
        done: list[list[Outcome]] = []
        while len(done) < len(jobs):
            if seat.child is None or not seat.child.is_running:
                seat.child, _ = self._started()
            try:
                seat.child.send(_batch(jobs[len(done) :], messages[len(done) :]))
                while len(done) < len(jobs):
                    job, most_bytes = jobs[len(done)], _most_reply_bytes(len(messages[len(done)]))
                    done.append(self._checked(seat.child.receive(most_bytes, len(job.parts)), len(job.parts)))
            except _Ended as failure:
                seat.child = None
                done.append([self._exceeded(str(failure))] * len(jobs[len(done)].parts))
        return done

    def _started(self) -> tuple[_Child, Mapping[str, Any]]:
        """A new child that has compiled the template, and its answer."""
        try:
            child = _Child()
            child.send(rendering.packed([_seconds_for(0), self._source]))
            reply = child.receive(_REPLY_BYTES, 0)
        except OSError as failure:
            raise ConfigError(
                f"{self.name}: the process that renders it cannot be started ({failure.strerror or failure}). Free "
                "memory or processes, or use a chat template by name, which needs no process of its own."
            ) from None
        except _Ended as failure:
            raise self._exceeded(str(failure)) from None
        if not isinstance(reply, dict) or "unusable" in reply:
            why = printable(reply.get("unusable") if isinstance(reply, dict) else reply, quoted=False)
            raise ConfigError(f"{self.name} cannot be used as a chat template: {why}. Use another, or one by name.")
        if "invalid" in reply:
            line = reply.get("line")
            raise ConfigError(
                f"{self.name} is not a chat template{f', line {line}' if isinstance(line, int) else ''}: "
                f"{printable(reply['invalid'], quoted=False)}. Correct it, or name another with --chat-template."
            )
        return child, reply

    def _checked(self, reply: Any, parts: int) -> list[Outcome]:
        if not isinstance(reply, list) or len(reply) != parts:
            return [self._exceeded("it answers with something other than texts")] * parts
        return list(map(self._read, reply))

    def _read(self, outcome: Any) -> Outcome:
        if isinstance(outcome, (str, int)):
            return outcome
        kind, why = next(iter(outcome.items())) if isinstance(outcome, dict) and outcome else ("limit", outcome)
        if kind == "refused":
            return DataError(f"{self.name} refuses the conversation: {printable(why)}.")
        if kind == "failed":
            return ConfigError(
                f"{self.name} fails on a conversation: {printable(why, quoted=False)}. Correct the template, or name "
                "another with --chat-template."
            )
        return self._exceeded(printable(why, quoted=False))

    def _exceeded(self, why: str) -> ConfigError:
        return ConfigError(f"{self.name}: {why}. Use a chat template that does less, or one by name.")


class _Seat:
    """Where the child of one process is; a forked process takes a new one."""

    def __init__(self) -> None:
        self.process_id = os.getpid()
        self.lock = threading.Lock()
        self.child: _Child | None = None


class _Ended(Exception):
    """A child has ended, or was ended, before it answered."""


class _Child:
    """A clean interpreter that renders one template; it ends with this object, and with this process.

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
                start_new_session=True,  # Ctrl-C is for this process
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
            _Ended: the child did not read it.
        """
        with self._ending(0):
            self._socket.settimeout(_MORE_SECONDS)
            self._socket.sendall(len(message).to_bytes(8, "big") + message)

    def receive(self, most_bytes: int, parts: int) -> Any:
        """What the child answers; an answer that is too long is not read.

        Raises:
            _Ended: the child exceeded a limit, or something else ended it.
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
        """Ends the child when anything goes wrong with it, and says why."""
        try:
            yield
        except TimeoutError:
            self._end()
            seconds = _seconds_for(parts) + _MORE_SECONDS
            raise _Ended(f"the process that renders it does not answer within {seconds:g} seconds") from None
        except (ValueError, RecursionError):
            self._end()
            raise _Ended("the process that renders it answers with something other than texts") from None
        except (EOFError, OSError):
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_MORE_SECONDS)
            self._end()
            raise _Ended(_reason(self._process.returncode, parts)) from None
        except BaseException:  # such as Ctrl-C: what the child answers belongs to nobody
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
    """Some jobs in one message, each with its limits."""
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
        return f"it computes for more than {_seconds_for(parts):g} seconds"
    if code == rendering.OUT_OF_MEMORY:
        return f"it needs more than {rendering.MEMORY_BYTES >> 20} MB of memory"
    return f"the process that renders it ended with {code}"
