"""Chat templates as Jinja renders them, and the child process that renders templates of unknown origin.

This file imports Jinja and the standard library only: `sandbox.py` starts it in a clean interpreter, gives it a
template, and then conversations. Jinja's sandbox keeps a template from Python. What the kernel holds this process to
(memory, processor time, no files, no processes) bounds everything else, so nothing that a template does is counted.

Messages in both directions are a length in eight bytes and JSON.

Source: the environment is that of Hugging Face's `transformers/utils/chat_template_utils.py`: blocks trimmed on both
sides, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import resource
import select
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MEMORY_BYTES = 256 << 20
OUT_OF_MEMORY = 12  # the exit code
_POLL_SECONDS = 2.0

_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "indent", "int", "items", "join",
    "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round",
    "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper",
)  # fmt: skip
_MARKED = "generation_block"  # a variable, so that a compiled template keeps no state
_EVERYTHING_ONCE = "{{ '\\u00e9' ~ strftime_now('%A') ~ [none]|tojson(indent=1) ~ missing.part }}"

# Why there is no text: {"refused": by the template}, {"limit": that it reached}, {"failed": what it raised}.
Failure = dict[str, str]
# A text of a conversation; where it is a beginning of the first one, only its length.
Outcome = str | int | Failure


class ConversationRefused(Exception):
    """What a template says through `raise_exception`."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses a block into a call of the variable that marks it, with the block as its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name(_MARKED, "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


class TemplateProgram:
    """A compiled template; it has no state, so threads may share it.

    Args:
        source: the template.

    Raises:
        jinja2.TemplateError, RecursionError, SyntaxError, ValueError: it cannot be compiled.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True,
            lstrip_blocks=True,
            cache_size=0,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        environment.filters = {name: environment.filters[name] for name in _FILTERS}
        environment.filters |= {"tojson": _as_json, "safe": str}
        environment.globals = {
            "range": environment.globals["range"],  # the sandbox's, of a bounded length
            "namespace": Namespace,
            "dict": dict,
            "raise_exception": _refuse,
        }
        tree = environment.parse(source)
        self.has_generation_blocks = any(
            isinstance(block.call.node, nodes.Name) and block.call.node.name == _MARKED
            for block in tree.find_all(nodes.CallBlock)
        )
        self._template = jinja2.Template.from_code(
            environment, environment.compile(tree, "template", "template"), environment.make_globals(None)
        )

    def write(self, variables: Mapping[str, Any], now: datetime.datetime, marks: Sequence[str]) -> str:
        """What the template writes.

        Args:
            now: the time that `strftime_now` shows.
            marks: what is written before and after each `{% generation %}` block.
        """

        def marked(caller: Callable[[], str]) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

        return self._template.render({**variables, "strftime_now": now.strftime, _MARKED: marked})

    def outcomes(self, job: Mapping[str, Any]) -> list[Outcome]:
        """The texts that are wanted of a conversation; what the template raises never gets out of here.

        Args:
            job: `sandbox.RenderJob` in JSON.

        Raises:
            MemoryError: there is not enough.
        """
        now = datetime.datetime.fromisoformat(job["now"])
        made: list[Outcome] = []
        for count, add_generation_prompt, marks in job["parts"]:
            variables = job["variables"]
            if count is not None:
                cut = variables["messages"][:count]
                variables = {**variables, "messages": cut, "add_generation_prompt": add_generation_prompt}
            outcome = self._outcome(variables, now, marks)
            is_beginning = (
                made and isinstance(made[0], str) and isinstance(outcome, str) and made[0].startswith(outcome)
            )
            made.append(len(outcome) if is_beginning else outcome)
        return made

    def _outcome(self, variables: Mapping[str, Any], now: datetime.datetime, marks: Sequence[str]) -> str | Failure:
        try:
            return self.write(variables, now, marks)
        except ConversationRefused as refusal:
            return {"refused": str(refusal)}
        except RecursionError:
            return {"limit": "it is nested too deeply"}
        except MemoryError:
            raise
        except Exception as failure:
            return {"failed": f"{type(failure).__name__}: {reason(failure)}"}


def compiled(source: str) -> tuple[TemplateProgram | None, dict[str, Any]]:
    """Compiles a template, and says whether that succeeded."""
    try:
        program = TemplateProgram(source)
    except jinja2.TemplateError as failure:
        return None, {"invalid": reason(failure), "line": getattr(failure, "lineno", None)}
    except (RecursionError, SyntaxError, ValueError) as failure:
        return None, {"unusable": reason(failure)}
    return program, {"has_generation_blocks": program.has_generation_blocks}


def reason(failure: BaseException) -> str:
    """What went wrong, in a line that is not too long."""
    if isinstance(failure, RecursionError):
        return "it is nested too deeply"
    return (str(failure) or type(failure).__name__)[:1000]


def packed(value: Any) -> bytes:
    """A message as JSON; texts may hold lone surrogates, as JSON from unknown sources may."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpacked(message: bytes | bytearray) -> Any:
    """What a message says."""
    return json.loads(message.decode("utf-8", "surrogatepass"))


def serve() -> None:
    """The child process: compiles the template of the first message, then answers batches of conversations.

    The first message is [seconds, source], every other one a list of [seconds, most bytes of the answer, job].
    Ends with its input, and also when its parent has ended while a forked process still holds the other end.
    """
    try:
        _serve(os.getppid())
    except MemoryError:
        raise SystemExit(OUT_OF_MEMORY) from None


def _serve(parent: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends this process
    TemplateProgram(_EVERYTHING_ONCE).outcomes(
        {"variables": {}, "now": "2024-07-26", "parts": [[None, None, ["", ""]]]}
    )
    _give_up_rights()
    opening = _received(parent)
    if opening is None:
        return
    seconds, source = unpacked(opening)
    with _timed(seconds):
        program, reply = compiled(source)
    _send(packed(reply))
    while program is not None and (batch := _received(parent)) is not None:
        for seconds, most_bytes, job in unpacked(batch):
            with _timed(seconds):
                answer = packed(program.outcomes(job))
            if len(answer) > most_bytes:
                answer = packed([{"limit": f"it writes more than {most_bytes:,} bytes"}] * len(job["parts"]))
            _send(answer)


def _give_up_rights() -> None:
    """Sets limits that cannot be raised again.

    macOS does not enforce a limit of the address space; there the limit of the data segment is tried.
    """
    limits = {"AS": MEMORY_BYTES, "DATA": MEMORY_BYTES, "CORE": 0, "FSIZE": 0, "NOFILE": 0, "NPROC": 0}
    for name, limit in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}", None)
        with contextlib.suppress(OSError, ValueError):
            if kind is not None:
                _, hard = resource.getrlimit(kind)
                lowest = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
                resource.setrlimit(kind, (lowest, lowest))


@contextlib.contextmanager
def _timed(seconds: float) -> Iterator[None]:
    signal.setitimer(signal.ITIMER_PROF, seconds)
    yield
    signal.setitimer(signal.ITIMER_PROF, 0)


def _received(parent: int) -> bytearray | None:
    length = _read(8, parent)
    return None if length is None else _read(int.from_bytes(length, "big"), parent)


def _read(count: int, parent: int) -> bytearray | None:
    content = bytearray()
    while len(content) < count:
        while not select.select([0], [], [], _POLL_SECONDS)[0]:
            if os.getppid() != parent:
                return None
        block = os.read(0, min(count - len(content), 1 << 20))
        if not block:
            return None
        content += block
    return content


def _send(message: bytes) -> None:
    waiting = memoryview(len(message).to_bytes(8, "big") + message)
    while waiting:
        waiting = waiting[os.write(1, waiting) :]


def _refuse(message: str) -> None:
    """`raise_exception` of templates."""
    raise ConversationRefused(str(message)[:1000])


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """JSON of a value, as `transformers` writes it."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
