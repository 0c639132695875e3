"""The JSON object of a request as typed values: fields are read by name, and a field that was never read is refused."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any

from megatron.errors import printable
from megatron.files.settings import without_repeats
from trident.serve.requests.refusals import Refusal, invalid

_MARKS = re.compile(rb'\\.|["\[\]{}]', re.S)  # an escape, a quotation mark or a bracket


def read_object(body: bytes, max_depth: int) -> dict[str, Any]:
    """Parses a body that must be one JSON object.

    Raises:
        Refusal: not UTF-8, not JSON, nested deeper than `max_depth`, a repeated key, or not an object.
    """
    _check_depth(body, max_depth)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=without_repeats(_repeated_key),
            parse_constant=_refuse_constant,
            parse_int=_integer,
        )
    except UnicodeDecodeError as failure:
        raise invalid(f"The body is not UTF-8: byte {failure.start} is 0x{body[failure.start]:02x}.") from failure
    except (ValueError, RecursionError) as failure:
        raise invalid(f"The body is not JSON: {printable(str(failure), quoted=False)}.") from failure
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {kind_of(value)}.")
    return value


class JsonFields:
    """The fields of one JSON object; null counts as absent.

    Args:
        prefix: path of the object, put before the names of fields in messages, as in `messages[0].`.
    """

    def __init__(self, values: Mapping[str, Any], prefix: str = "") -> None:
        self._values = values
        self._prefix = prefix
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """The field as it is; None if it is absent."""
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text without lone surrogates."""
        value = self.value(name)
        return default if value is None else checked_text(value, self._prefix + name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, not {kind_of(value)}")
        return value

    def integer(self, name: str, default: Any, at_least: int, at_most: int) -> Any:
        """An integer within bounds; 3.0 counts as 3."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, float) and math.isinf(value):
            raise self.refuse(name, f"is a number too large to be used; it must be from {at_least} to {at_most}")
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.refuse(name, f"must be an integer, not {kind_of(value)}")
        if not at_least <= value <= at_most:
            raise self.refuse(name, f"is {printable(value)}, but must be from {at_least} to {at_most}")
        return value

    def number(self, name: str, default: Any, at_least: float, at_most: float) -> Any:
        """A finite number within bounds."""
        value = self.value(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise self.refuse(name, f"must be a number, not {kind_of(value)}")
        if isinstance(value, float) and math.isinf(value):
            raise self.refuse(name, f"is a number too large to be used; it must be from {at_least:g} to {at_most:g}")
        if not at_least <= value <= at_most:
            raise self.refuse(name, f"is {printable(value)}, but must be from {at_least:g} to {at_most:g}")
        return float(value)

    def list_of(self, name: str, item: Callable[[Any, str], Any], at_most: int, default: Any = None) -> Any:
        """A list, whose entries are read by `item(entry, path)`."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, list):
            raise self.refuse(name, f"must be a list, not {kind_of(value)}")
        if len(value) > at_most:
            raise self.refuse(name, f"has {len(value)} entries, but may have at most {at_most}")
        return [item(entry, f"{self._prefix}{name}[{number}]") for number, entry in enumerate(value)]

    def unsupported(self, name: str, reason: str, harmless: Collection[Any] = ()) -> None:
        """Refuses a field of OpenAI's API that this server does not support.

        Args:
            reason: the end of the message.
            harmless: values that are accepted because they change nothing.
        """
        value = self.value(name)
        if value is None or any(value == one and type(value) is type(one) for one in harmless):
            return
        raise self.refuse(name, f"is not supported here: {reason}", code="unsupported_parameter")

    def without_effect(self, *names: str) -> None:
        """Accepts fields that by definition do not affect an answer."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuses the fields that were never read."""
        unknown = [name for name in self._values if name not in self._read]
        if unknown:
            known = ", ".join(sorted(self._read))
            shown = printable(unknown[0], 60, quoted=False)
            raise self.refuse(shown, f"is not a field of this request. Known fields: {known}", code="unknown_parameter")

    def refuse(self, name: str, reason: str, code: str | None = None) -> Refusal:
        """A refusal of a field of this object."""
        return refuse_field(f"{self._prefix}{name}", reason, code)


def checked_text(value: Any, path: str) -> str:
    """Returns a value that must be a text.

    Raises:
        Refusal: not a text, or a text with lone surrogates.
    """
    if not isinstance(value, str):
        raise refuse_field(path, f"must be a text, not {kind_of(value)}")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise refuse_field(path, "holds half of a surrogate pair, which is not a character")
    return value


def refuse_field(path: str, reason: str, code: str | None = None) -> Refusal:
    """A refusal that names a field by its full path."""
    return invalid(f"'{path}' {reason}.", path, code)


def kind_of(value: Any) -> str:
    """A value's JSON type, with the value itself if it is short."""
    if value is None:
        return "null"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return "a list"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float) and math.isinf(value):
        return "a number too large to be used"
    return f"{'the text' if isinstance(value, str) else 'the number'} {printable(value, 60)}"


def _check_depth(body: bytes, max_depth: int) -> None:
    """Refuses a body that nests too deeply, in linear time, before a parser recurses into it."""
    if body.count(b"[") + body.count(b"{") <= max_depth:
        return
    depth, in_text = 0, False
    for match in _MARKS.finditer(body):
        mark = match.group()
        if mark == b'"':
            in_text = not in_text
        elif in_text:
            continue
        elif mark in (b"[", b"{"):
            depth += 1
            if depth > max_depth:
                raise invalid(f"The body nests lists and objects deeper than {max_depth} levels.")
        elif mark in (b"]", b"}"):
            depth -= 1


def _repeated_key(name: str) -> ValueError:
    return ValueError(f"the key {printable(name, 60)} occurs twice in one object")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _integer(digits: str) -> int | float:
    """An integer; infinity, which every bound refuses, if it is too long for cheap arithmetic."""
    return int(digits) if len(digits) < 40 else math.copysign(math.inf, -1.0 if digits[0] == "-" else 1.0)
