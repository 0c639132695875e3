"""Declarations of dataclass fields that are also command-line flags.

A field declared with `flag()` becomes a flag of the same name with dashes; a boolean field also gets `--no-name`.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.config.flags.paths import PathUse

MAY_CHANGE = "may change"
MUST_MATCH = "must match"
RUN_MUST_MATCH = "must match unless --finetune"
FROM_CHECKPOINT = "from the checkpoint"

SMALLEST_FLOAT32 = 2.0**-126  # smaller values may be flushed to 0 on the device


class Unset(enum.Enum):
    """Placeholder for a computed default until the section is complete."""

    COMPUTED = "computed"


@dataclass(frozen=True)
class FlagFacts:
    """The arguments of `flag()`, which documents them."""

    help: str
    spelled: tuple[str, ...] = ()
    nargs: str | int | None = None
    choices: tuple[Any, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    computed: Callable[[Any], Any] | None = None
    follows: tuple[str, ...] = ()
    resume: str = MAY_CHANGE
    ignored: str | None = None
    remedy: str = ""
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    by_layer: str | None = None
    numeric: bool = False
    once: bool = False
    path: PathUse | None = None


def flag(default: Any = dataclasses.MISSING, help: str = "", **facts: Any) -> Any:
    """Declares a dataclass field that is also a flag.

    Args:
        default: value without the flag; omitted, the flag is required unless its default is computed.
        help: one sentence for `--help`.
        spelled: additional spellings; for a boolean, a spelling with `-no-` turns it off.
        nargs: "+" requires at least one value.
        choices: the allowed values.
        at_least, above, at_most, below: bounds of the value.
        computed: function of the section that returns the default, or raises ConfigError.
        follows: fields that a computed default depends on.
        resume: behavior of the field on resume.
        ignored: reason that the flag has no effect.
        remedy: alternative to a refused value, for the message.
        synonyms: alternative names of values.
        by_layer: field for several values, one for each layer.
        numeric: a switch that also accepts 1 and 0, as upstream's does.
        once: refuse two different values; otherwise the last one counts, and lists of strings are concatenated.
        path: use of the path that is the value.
    """
    if "computed" in facts:
        default = Unset.COMPUTED
    return dataclasses.field(default=default, metadata={"flag": FlagFacts(help=help, **facts)}, kw_only=True)


def network_flag(default: Any = dataclasses.MISSING, help: str = "", **facts: Any) -> Any:
    """Declares a flag of the network architecture, which a resume must match. Takes the arguments of `flag`."""
    return flag(default, help, resume=MUST_MATCH, **facts)


def derived(help: str, *, default: Any = dataclasses.MISSING, resume: str = MAY_CHANGE) -> Any:
    """Declares a dataclass field without a flag, computed by `resolve`.

    Args:
        help: description of the field.
        default: value for configurations saved by an older version without the field.
        resume: behavior of the field on resume.
    """
    return dataclasses.field(default=default, metadata={"derived": help, "resume": resume}, kw_only=True)


@dataclass(frozen=True)
class Flag:
    """A flag of a dataclass: its name, its type and the arguments of `flag()`."""

    field: str
    element: type
    facts: FlagFacts
    default: Any
    required: bool
    is_tuple: bool
    count: int | None

    @property
    def name(self) -> str:
        """The flag in upstream's spelling; `--no-...` for a boolean that is on by default."""
        return ("--no-" if self.default is True else "--") + self.field.replace("_", "-")

    @property
    def positive_name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @functools.cached_property
    def spellings(self) -> dict[str, bool]:
        """The accepted option strings; False for those that turn a boolean off."""
        accepted = {self.positive_name: True}
        if self.element is bool:
            if not self.field.startswith("no_"):
                accepted["--no-" + self.field.replace("_", "-")] = False
            for text in self.facts.spelled:
                accepted[text] = self.field.startswith("no_") or "-no-" not in text
        else:
            accepted.update(dict.fromkeys(self.facts.spelled, True))
        return accepted

    @property
    def type_name(self) -> str:
        """The type for `--help`."""
        if not self.is_tuple:
            return self.element.__name__
        return f"{self.element.__name__} x {self.count}" if self.count else f"{self.element.__name__} ..."

    @property
    def shown_default(self) -> str:
        """The default for `--help` and the golden list."""
        if self.element is bool and not self.is_tuple and self.default is not None:
            return "on" if self.default else "off"
        if isinstance(self.default, tuple):
            return " ".join(str(item) for item in self.default) or "none"
        return str(self.default)

    @property
    def empty_value(self) -> Any:
        """The empty value of the flag's type: zero, false, the empty string or the empty tuple."""
        return () if self.is_tuple else self.element()


def as_written(name: str, value: Any) -> str:
    """A flag and its value as on a command line."""
    if isinstance(value, bool):
        return name if value else f"--no-{name.removeprefix('--')}"
    return f"{name} {' '.join(map(str, value)) if isinstance(value, tuple) else value}"


def flags_of(cls: type) -> tuple[Flag, ...]:
    """All flags of a dataclass, in the order of their declaration."""
    return _read_flags(cls)


@functools.cache
def _read_flags(cls: type) -> tuple[Flag, ...]:
    hints = typing.get_type_hints(cls)
    flags = []
    for field in dataclasses.fields(cls):
        facts = field.metadata.get("flag")
        if facts is not None:
            element, is_tuple, count = _read_type(hints[field.name])
            required = field.default is dataclasses.MISSING
            default = None if required or field.default is Unset.COMPUTED else field.default
            flags.append(Flag(field.name, element, facts, default, required, is_tuple, count))
    return tuple(flags)


def resume_rule(field: dataclasses.Field[Any]) -> str:
    """The behavior of a field on resume."""
    facts = field.metadata.get("flag")
    return facts.resume if facts is not None else field.metadata.get("resume", MAY_CHANGE)


def _read_type(hint: Any) -> tuple[type, bool, int | None]:
    """Splits a field's type into (element type, is a tuple, fixed length of the tuple)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        return parts[0], True, None if parts[-1] is Ellipsis else len(parts)
    return hint, False, None
