"""The JSON object of a request as typed values: every field is read by name, and one that nothing reads is refused."""

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


def read_object(body: bytes, most_depth: int) -> dict[str, Any]:
    """Parses a body that must be one JSON object.

    Raises:
        Refusal: it is not UTF-8, not JSON, nested deeper than `most_depth`, repeats a key, or is not an object.
    """
    _check_depth(body, most_depth)
    try:
        value = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=without_repeats(_repeated_key),
            parse_constant=_refuse_constant,
            parse_int=_whole,
        )
    except UnicodeDecodeError as failure:
        raise invalid(f"The body is not UTF-8: byte {failure.start} is 0x{body[failure.start]:02x}.") from failure
    except (ValueError, RecursionError) as failure:
        raise invalid(f"The body is not JSON: {printable(str(failure), quoted=False)}.") from failure
    if not isinstance(value, dict):
        raise invalid(f"The body must be a JSON object, not {kind_of(value)}.")
    return value


class JsonFields:
    """The fields of one JSON object; a field that is null counts as absent.

    Args:
        values: of the object.
        place: put before the names of fields in messages, as in `messages[0].`.
    """

    def __init__(self, values: Mapping[str, Any], place: str = "") -> None:
        self._values = values
        self._place = place
        self._read: set[str] = set()

    def value(self, name: str) -> Any:
        """The field as it is; None if it is absent."""
        self._read.add(name)
        return self._values.get(name)

    def text(self, name: str, default: str | None = None) -> str | None:
        """A text without lone surrogates."""
        value = self.value(name)
        return default if value is None else checked_text(value, self._place + name)

    def flag(self, name: str, default: bool = False) -> bool:
        """True or false."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.refuse(name, f"must be true or false, not {kind_of(value)}")
        return value

    def whole(self, name: str, default: Any, at_least: int, at_most: int) -> Any:
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

    def list_of(self, name: str, item: Callable[[Any, str], Any], most: int, default: Any = None) -> Any:
        """A list, each item of which `item` reads; it is given the item and its place."""
        value = self.value(name)
        if value is None:
            return default
        if not isinstance(value, list):
            raise self.refuse(name, f"must be a list, not {kind_of(value)}")
        if len(value) > most:
            raise self.refuse(name, f"has {len(value)} entries, but may have at most {most}")
        return [item(entry, f"{self._place}{name}[{number}]") for number, entry in enumerate(value)]

    def unsupported(self, name: str, reason: str, harmless: Collection[Any] = ()) -> None:
        """Refuses a field of OpenAI's that this server cannot honour, unless its value asks for nothing.

        Args:
            reason: the rest of the message after the name of the field.
            harmless: values that ask for what happens anyway.
        """
        value = self.value(name)
        if value is None or any(value == one and type(value) is type(one) for one in harmless):
            return
        raise self.refuse(name, f"is not supported here: {reason}", code="unsupported_parameter")

    def without_effect(self, *names: str) -> None:
        """Accepts fields that by their definition change no answer."""
        self._read.update(names)

    def finish(self) -> None:
        """Refuses the fields that nothing has read."""
        unknown = [name for name in self._values if name not in self._read]
        if unknown:
            known = ", ".join(sorted(self._read))
            shown = printable(unknown[0], 60, quoted=False)
            raise self.refuse(shown, f"is not a field of this request. Known are {known}", code="unknown_parameter")

    def refuse(self, name: str, reason: str, code: str | None = None) -> Refusal:
        """A refusal that names a field and says what is wrong with it."""
        return refuse_field(f"{self._place}{name}", reason, code)


def checked_text(value: Any, place: str) -> str:
    """A value that must be a text.

    Raises:
        Refusal: it is another kind of value, or not Unicode.
    """
    if not isinstance(value, str):
        raise refuse_field(place, f"must be a text, not {kind_of(value)}")
    if not value.isascii() and any("\ud800" <= letter <= "\udfff" for letter in value):
        raise refuse_field(place, "holds half of a surrogate pair, which is not a character")
    return value


def refuse_field(place: str, reason: str, code: str | None = None) -> Refusal:
    """A refusal that names a field by its whole place and says what is wrong with it."""
    return invalid(f"'{place}' {reason}.", place, code)


def kind_of(value: Any) -> str:
    """What JSON calls a value, shown shortly."""
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


def _check_depth(body: bytes, most: int) -> None:
    """Refuses a body that nests too deeply before a parser recurses into it; in linear time."""
    if body.count(b"[") + body.count(b"{") <= most:
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
            if depth > most:
                raise invalid(f"The body nests lists and objects deeper than {most} levels.")
        elif mark in (b"]", b"}"):
            depth -= 1


def _repeated_key(name: str) -> ValueError:
    return ValueError(f"the key {printable(name, 60)} occurs twice in one object")


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not a number in JSON")


def _whole(digits: str) -> int | float:
    """An integer; a huge one as infinity, which every bound refuses, instead of long arithmetic."""
    return int(digits) if len(digits) < 40 else math.copysign(math.inf, -1.0 if digits[0] == "-" else 1.0)
