"""Jinja programs of unknown origin, bounded in size, work and output.

Jinja's own sandbox keeps a program from Python; it does not keep it from `'a' * 10 ** 9` or from nested loops. So a
program may only use the filters, functions and methods that chat templates use, each of which is charged for the
characters and elements that it handles before it handles them, and every turn of a loop is charged as well. One that
exceeds its budget or its time is refused.

Source: the environment is that of Hugging Face's `transformers/utils/chat_template_utils.py`: blocks trimmed on both
sides, loop controls, `raise_exception`, `strftime_now`, `tojson` without HTML escapes, `{% generation %}`.
"""

from __future__ import annotations

import datetime
import functools
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from megatron.errors import ConfigError, DataError, printable

MOST_TEMPLATE_BYTES = 128 << 10
_BASE_UNITS = 2 << 20
_UNITS_PER_LETTER = 64
_MOST_SECONDS = 5.0  # of this thread's own computing; a conversation takes less than a millisecond
_MOST_ELEMENTS = 100_000  # of a range
_MOST_NESTED = 10_000  # values in a list or a dictionary that a template makes, all levels counted
_LARGEST_OPTION = 1_000  # an option of a filter, such as the width of indent
_MOST_BITS = 4_096
_UNITS_PER_CALL = 64  # and per turn of a loop
_UNITS_PER_PIECE = 64  # a list element costs bytes that its letters do not show

_FILTERS = (
    "abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "indent", "int", "items", "last",
    "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace", "reverse", "round", "select",
    "selectattr", "sort", "string", "title", "trim", "unique", "upper",
)  # fmt: skip
_TEXT_METHODS = frozenset({
    "capitalize", "casefold", "count", "endswith", "find", "index", "isalnum", "isalpha", "isdecimal", "isdigit",
    "islower", "isnumeric", "isspace", "istitle", "isupper", "join", "lower", "lstrip", "partition", "removeprefix",
    "removesuffix", "replace", "rfind", "rindex", "rpartition", "rsplit", "rstrip", "split", "splitlines",
    "startswith", "strip", "swapcase", "title", "upper",
})  # fmt: skip
_JINJAS_OWN = ("_loop_vars", "_block_vars")  # arguments that compiled programs add for its own functions
_MAPPING_METHODS = frozenset({"get", "items", "keys", "values"})
_SEQUENCE_METHODS = frozenset({"count", "index"})
_UNSAFE_FORMAT = re.compile(r"\*|\d{4}")  # a width that is computed, or of more than three digits
_Repeated = TypeVar("_Repeated", nodes.For, nodes.Macro)
_FORBIDDEN = (nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)


class _Refused(Exception):
    """A program asked for something that is not allowed, or for too much."""


class BoundedTemplate:
    """A compiled chat template; safe to use from several threads.

    Args:
        source: the Jinja program.
        name: what it is called in errors.

    Raises:
        ConfigError: it is too long, cannot be read, or uses what chat templates have no need of.
    """

    def __init__(self, source: str, name: str) -> None:
        self.name = name
        size = len(source.encode("utf-8", "surrogatepass"))
        if size > MOST_TEMPLATE_BYTES:
            raise ConfigError(
                f"{name} holds {size:,} bytes; a chat template may hold {MOST_TEMPLATE_BYTES:,}. Is it the right file?"
            )
        self._environment = _Environment()
        self._lock = threading.Lock()
        try:
            tree = self._environment.parse(source)
            self.has_generation_blocks = self._environment.has_generation_blocks
            program = self._environment.compile(_Charging().visit(_checked(tree)), name, name)
            self._template = jinja2.Template.from_code(self._environment, program, self._environment.make_globals(None))
        except jinja2.TemplateError as failure:
            line = getattr(failure, "lineno", None)
            raise ConfigError(
                f"{name} is not a chat template{f', line {line}' if line else ''}: {_reason(failure)}. Correct it, or "
                "name another with --chat-template."
            ) from None
        except (_Refused, RecursionError, MemoryError, SyntaxError, ValueError) as failure:
            raise ConfigError(f"{name} cannot be used as a chat template: {_reason(failure)}.") from None

    def render(
        self,
        variables: Mapping[str, Any],
        now: datetime.datetime | None = None,
        generation_marks: tuple[str, str] = ("", ""),
    ) -> str:
        """What the program writes.

        Args:
            now: the time that `strftime_now` tells; the clock's if left out.
            generation_marks: what is written before and after each `{% generation %}` block.

        Raises:
            ConfigError: the program fails or exceeds its budget.
            DataError: it refuses the conversation (`raise_exception`).
        """
        with self._lock:
            environment = self._environment
            environment.begin(_BASE_UNITS + _UNITS_PER_LETTER * _size(variables), now, generation_marks)
            try:
                return "".join(self._template.generate(**variables))
            except _ConversationRefused as refusal:
                raise DataError(f"{self.name} refuses the conversation: {printable(str(refusal))}.") from None
            except (_Refused, RecursionError, MemoryError) as failure:
                raise ConfigError(
                    f"{self.name}: {_reason(failure)}. Use a chat template that does less, or one by name."
                ) from None
            except Exception as failure:
                raise ConfigError(
                    f"{self.name} fails on a conversation: {type(failure).__name__}: {_reason(failure)}. Correct the "
                    "template, or name another with --chat-template."
                ) from None
            finally:
                environment.begin(0, None, ("", ""))


class _ConversationRefused(Exception):
    """What a program says through `raise_exception`."""


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}`: marks what the assistant wrote."""

    tags = {"generation"}  # noqa: RUF012, as Jinja declares it

    def parse(self, parser: Parser) -> nodes.Node:
        """Parses a block into a call of `marked` with the block as its body."""
        line = next(parser.stream).lineno
        parser.environment.has_generation_blocks = True  # type: ignore[attr-defined]
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        call = nodes.Call(nodes.EnvironmentAttribute("marked"), [], [], None, None)
        return nodes.CallBlock(call, [], [], body).set_lineno(line)


class _Environment(ImmutableSandboxedEnvironment):
    """The functions, filters and operators of chat templates, each charged to the budget of the render that runs."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,  # a constant expression would be computed before there is a budget
            cache_size=0,
            finalize=self._finalized,
            extensions=["jinja2.ext.loopcontrols", _Generation],
        )
        self.has_generation_blocks = False
        known = {name: self._charged(name, self.filters[name]) for name in _FILTERS}
        self.filters = {**known, "tojson": self._as_json, "join": self._joined_by, "safe": str}
        self.globals = {
            "range": self.numbers,
            "namespace": Namespace,
            "dict": lambda *given, **named: self.weighed(dict(*given, **named)),
            "raise_exception": _refuse,
            "strftime_now": self.strftime_now,
        }
        self._functions = tuple(self.globals.values())
        self.begin(0, None, ("", ""))

    def begin(self, units: int, now: datetime.datetime | None, marks: tuple[str, str]) -> None:
        """Gives a render its budget and its clock."""
        self._left = units
        self._ends_at = time.thread_time() + _MOST_SECONDS
        self._now = now
        self._marks = marks

    def charge(self, units: int) -> str:
        """Takes units from the budget; called by the programs themselves in every turn of a loop.

        Raises:
            _Refused: there are not enough left, or the time is over.
        """
        self._left -= units
        if self._left < 0:
            raise _Refused("it does far more work than a conversation of this length needs")
        if time.thread_time() > self._ends_at:
            raise _Refused(f"it computes for more than {_MOST_SECONDS:g} seconds")
        return ""

    def joined(self, *values: Any) -> str:
        """The texts of some values back to back, Jinja's `~`."""
        self.charge(sum(map(_size, values)))
        return "".join(map(str, values))

    def weighed(self, value: Any) -> Any:
        """A list, tuple or dictionary that a program made, if it is not too large."""
        weight = _size(value, by_letters=False, most=_MOST_NESTED)
        if weight > _MOST_NESTED:
            raise _Refused(f"it makes a list of more than {_MOST_NESTED:,} values")
        self.charge(weight)
        return value

    def marked(self, caller: Callable[[], str]) -> str:
        """The text of a generation block between its marks."""
        return f"{self._marks[0]}{caller()}{self._marks[1]}"

    def call(self, context: Any, called: Any, /, *given: Any, **named: Any) -> Any:  # type: ignore[override]
        """Calls a function or method that chat templates need; all others are refused."""
        owner = getattr(called, "__self__", None)
        if owner is not self:
            self.charge(_UNITS_PER_CALL)
            if isinstance(called, Macro) or any(called is function for function in self._functions):
                return context.call(called, *given, **named)
        named = {key: value for key, value in named.items() if key not in _JINJAS_OWN}
        if owner is self:
            return called(*given, **named)
        name = getattr(called, "__name__", "")
        if isinstance(owner, str) and name in _TEXT_METHODS:
            return self._text_method(owner, name, called, given, named)
        if isinstance(owner, Mapping) and name in _MAPPING_METHODS:
            self.charge(len(owner))
            return called(*given, **named)
        if isinstance(owner, (list, tuple)) and name in _SEQUENCE_METHODS:
            self.charge(len(owner))
            return called(*given, **named)
        if isinstance(owner, LoopContext) and name in ("cycle", "changed"):
            return called(*given, **named)
        if isinstance(called, jinja2.Undefined):
            return called()  # raises the error that names it
        raise _Refused(f"it calls {name or type(called).__name__}, which chat templates may not")

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Computes what may grow without limit otherwise."""
        if operator == "*":
            self._check_product(left, right)
        elif operator == "**" and (_bits(left) * abs(right) if isinstance(right, int) else 0) > _MOST_BITS:
            raise _Refused("it computes a very large number")
        elif operator == "%" and isinstance(left, str):
            if _UNSAFE_FORMAT.search(left):
                raise _Refused("it formats a text with a large width")
            self.charge(len(left) + _size(right))
        elif operator == "+" and not isinstance(left, (int, float)):
            self.charge(len(left) + len(right) if hasattr(left, "__len__") and hasattr(right, "__len__") else 1)
            result = super().call_binop(context, operator, left, right)
            return self.weighed(result) if isinstance(result, (list, tuple)) else result
        return super().call_binop(context, operator, left, right)

    def _check_product(self, left: Any, right: Any) -> None:
        if isinstance(left, int) and isinstance(right, int):
            if _bits(left) + _bits(right) > _MOST_BITS:
                raise _Refused("it computes a very large number")
            return
        for many, times in ((left, right), (right, left)):
            if hasattr(many, "__len__") and isinstance(times, int):
                self.charge(_size(many) * max(times, 0))

    def _text_method(
        self, text: str, name: str, method: Callable[..., Any], given: tuple[Any, ...], named: Mapping[str, Any]
    ) -> Any:
        self.charge(len(text))
        if name == "join":
            return self._joined_by(given[0] if given else (), text)
        if name == "replace":
            self._charge_replacement(text, *given)
        elif name in ("split", "rsplit"):
            separator = given[0] if given else named.get("sep")
            self.charge(_UNITS_PER_PIECE * (text.count(separator) if separator else len(text) // 2))
        elif name == "splitlines":
            self.charge(_UNITS_PER_PIECE * len(text) // 2)
        return method(*given, **named)

    def _charge_replacement(self, text: str, old: Any = "", new: Any = "", *_: Any) -> None:
        if isinstance(old, str) and isinstance(new, str):
            self.charge(len(text) + text.count(old) * len(new))

    def _finalized(self, value: Any) -> Any:
        """Charges for what is about to be written."""
        self.charge(_size(value, most=max(self._left, 0)))
        return value

    def _charged(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """A filter of Jinja's that is charged for its value, and whose options are not huge."""

        @functools.wraps(function)
        def charged(*given: Any, **named: Any) -> Any:
            skipped = 1 if hasattr(function, "jinja_pass_arg") else 0
            value, options = given[skipped] if len(given) > skipped else "", given[skipped + 1 :]
            if any(isinstance(one, int) and abs(one) > _LARGEST_OPTION for one in (*options, *named.values())):
                raise _Refused(f"it gives a filter an option beyond {_LARGEST_OPTION}")
            self.charge(1 + _size(value, most=max(self._left, 0)))
            if name == "replace":
                self._charge_replacement(str(value), *options[:2])
            elif name == "indent":
                width = max([len(one) if isinstance(one, str) else one for one in options[:1]] or [4])
                self.charge((str(value).count("\n") + 1) * max(int(width), 4))
            elif name in ("list", "reverse") and isinstance(value, str):
                self.charge(_UNITS_PER_PIECE * len(value))
            return function(*given, **named)

        return charged

    def _as_json(
        self,
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        """JSON of a value, as `transformers` writes it."""
        if isinstance(indent, int) and indent > 16:
            raise _Refused(f"it indents JSON by {indent}")
        self.charge(8 * _size(value, most=max(self._left, 0)))
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def _joined_by(self, values: Iterable[Any], separator: Any = "", attribute: str | None = None) -> str:
        """The texts of some values with a separator between them."""
        texts = []
        for value in values:
            one = value if attribute is None else self.getitem(value, attribute)
            self.charge(_size(one, most=max(self._left, 0)) + len(str(separator)))
            texts.append(str(one))
        return str(separator).join(texts)

    def numbers(self, *bounds: int) -> range:
        """A range of a bounded length."""
        numbers = range(*bounds)
        if len(numbers) > _MOST_ELEMENTS:
            raise _Refused(f"it counts {len(numbers):,} numbers")
        return numbers

    def strftime_now(self, format: str) -> str:
        """The time of this render."""
        if len(format) > 100 or re.search(r"%\W*\d", format):
            raise _Refused("it formats a date in an unusual way")
        return (self._now or datetime.datetime.now()).strftime(format)


class _Charging(NodeTransformer):
    """Puts charges into a program: for every turn of a loop, every `~`, and every list or dictionary."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        """Charges each turn for the text in the loop."""
        return self._charged(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        """Charges each call for the text in the macro."""
        return self._charged(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        """Has the environment join texts."""
        self.generic_visit(node)
        return _own_call("joined", list(node.nodes))

    def visit_List(self, node: nodes.List) -> nodes.Node:
        """Has the environment weigh a list."""
        self.generic_visit(node)
        return _own_call("weighed", [node])

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        """Has the environment weigh a dictionary."""
        self.generic_visit(node)
        return _own_call("weighed", [node])

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        """Has the environment weigh a tuple, unless it is the target of an assignment."""
        self.generic_visit(node)
        return _own_call("weighed", [node]) if node.ctx == "load" else node

    def _charged(self, node: _Repeated) -> _Repeated:
        written = sum(len(one.data) for one in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        charge = _own_call("charge", [nodes.Const(_UNITS_PER_CALL + written)])
        node.body.insert(0, nodes.Output([charge]).set_lineno(node.lineno))
        return node


def _own_call(name: str, values: list[nodes.Expr]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), values, [], None, None)


def _checked(tree: nodes.Template) -> nodes.Template:
    for node in tree.find_all(_FORBIDDEN):
        raise _Refused(f"line {node.lineno} reads another file")
    for loop in tree.find_all(nodes.For):
        if loop.recursive:
            raise _Refused(f"line {loop.lineno} has a recursive loop")
    return tree


def _refuse(message: str) -> None:
    """`raise_exception` of templates."""
    raise _ConversationRefused(str(message)[:1000])


def _size(value: Any, by_letters: bool = True, most: int = 1 << 40) -> int:
    """Letters and elements of a value, those inside of others included; counting ends beyond `most`."""
    if isinstance(value, str):
        return len(value) if by_letters else 1
    total = 0
    waiting = [value]
    while waiting and total <= most:
        one = waiting.pop()
        if isinstance(one, str):
            total += len(one) if by_letters else 1
        elif isinstance(one, Mapping):
            total += 1 + len(one)
            waiting += [*one.keys(), *one.values()]
        elif isinstance(one, (list, tuple)):
            total += 1 + len(one)
            waiting += one
        else:
            total += 1
    return total


def _bits(number: Any) -> int:
    return number.bit_length() if isinstance(number, int) else 64


def _reason(failure: BaseException) -> str:
    if isinstance(failure, RecursionError):
        return "it is nested too deeply"
    return printable(str(failure) or type(failure).__name__, quoted=False)
