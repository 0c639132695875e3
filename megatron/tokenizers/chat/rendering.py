"""Rendering of chat templates by Jinja, and the child process that renders untrusted templates.

This file imports only Jinja and the standard library: `sandbox.py` starts it in a clean interpreter and sends it a
template, then conversations. Jinja's sandbox isolates a template from Python; kernel limits on this process (memory,
processor time, no files, no processes) bound everything else.

Messages in both directions are a length in eight bytes and JSON.

Source: the environment follows Hugging Face's `transformers/utils/chat_template_utils.py`: blocks trimmed on both
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

# {"refused": message of the template}, {"limit": exceeded limit}, or {"failed": exception}
Failure = dict[str, str]
# A text of a conversation, or only its length if it is a prefix of the first one.
Outcome = str | int | Failure


class ConversationRefused(Exception):
    """Raised by a template's `raise_exception`."""


class _Generation(Extension):
    """The block `{% generation %} ... {% endgeneration %}`, which marks the assistant's text."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses a block into a call of the marking variable, with the block as its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.Name(_MARKED, "load"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


class TemplateProgram:
    """A compiled template; stateless, so threads may share it.

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
            "range": environment.globals["range"],  # the sandbox's, with bounded length
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
        """Renders the template.

        Args:
            now: the time for `strftime_now`.
            marks: texts before and after each `{% generation %}` block.
        """

        def marked(caller: Callable[[], str]) -> str:
            return f"{marks[0]}{caller()}{marks[1]}"

        return self._template.render({**variables, "strftime_now": now.strftime, _MARKED: marked})

    def outcomes(self, job: Mapping[str, Any]) -> list[Outcome]:
        """Renders the requested texts of a conversation; exceptions of the template become outcomes.

        Args:
            job: `sandbox.RenderJob` in JSON.

        Raises:
            MemoryError: out of memory.
        """
        now = datetime.datetime.fromisoformat(job["now"])
        outcomes: list[Outcome] = []
        for count, add_generation_prompt, marks in job["parts"]:
            variables = job["variables"]
            if count is not None:
                cut = variables["messages"][:count]
                variables = {**variables, "messages": cut, "add_generation_prompt": add_generation_prompt}
            outcome = self._outcome(variables, now, marks)
            is_beginning = (
                outcomes
                and isinstance(outcomes[0], str)
                and isinstance(outcome, str)
                and outcomes[0].startswith(outcome)
            )
            outcomes.append(len(outcome) if is_beginning else outcome)
        return outcomes

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
    """Compiles a template; returns the program or None, and a reply with its properties or the error."""
    try:
        program = TemplateProgram(source)
    except jinja2.TemplateError as failure:
        return None, {"invalid": reason(failure), "line": getattr(failure, "lineno", None)}
    except (RecursionError, SyntaxError, ValueError) as failure:
        return None, {"unusable": reason(failure)}
    return program, {"has_generation_blocks": program.has_generation_blocks}


def reason(failure: BaseException) -> str:
    """Returns the message of an exception, truncated."""
    if isinstance(failure, RecursionError):
        return "it is nested too deeply"
    return (str(failure) or type(failure).__name__)[:1000]


def packed(value: Any) -> bytes:
    """Encodes a message as JSON; texts may contain lone surrogates."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def unpacked(message: bytes | bytearray) -> Any:
    """Decodes a message."""
    return json.loads(message.decode("utf-8", "surrogatepass"))


def serve() -> None:
    """Runs the child process: compiles the template of the first message, then renders batches of conversations.

    The first message is [seconds, source], every other one a list of [seconds, maximum bytes of the reply, job].
    Exits at the end of its input, and when its parent exited while a forked process still holds the other end.
    """
    try:
        _serve(os.getppid())
    except MemoryError:
        raise SystemExit(OUT_OF_MEMORY) from None


def _serve(parent: int) -> None:
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # terminates this process
    TemplateProgram(_EVERYTHING_ONCE).outcomes(
        {"variables": {}, "now": "2024-07-26", "parts": [[None, None, ["", ""]]]}
    )
    _drop_privileges()
    first = _received(parent)
    if first is None:
        return
    seconds, source = unpacked(first)
    with _timed(seconds):
        program, properties = compiled(source)
    _send(packed(properties))
    while program is not None and (batch := _received(parent)) is not None:
        for seconds, most_bytes, job in unpacked(batch):
            with _timed(seconds):
                reply = packed(program.outcomes(job))
            if len(reply) > most_bytes:
                reply = packed([{"limit": f"it renders more than {most_bytes:,} bytes"}] * len(job["parts"]))
            _send(reply)


def _drop_privileges() -> None:
    """Sets limits that cannot be raised again."""
    # DATA as well: macOS does not enforce a limit of the address space.
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
    """Implements `raise_exception` of templates."""
    raise ConversationRefused(str(message)[:1000])


def _as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Converts a value to JSON like `transformers`."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
