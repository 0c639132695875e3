"""Declaring a dataclass field that is also a command-line flag, and reading those declarations back.

A field declared with `flag()` becomes the flag of its name with dashes. A boolean field gets `--name` and `--no-name`.
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

SMALLEST_FLOAT32 = 2.0**-126  # anything below may count as 0 on the device


class Unset(enum.Enum):
    """Placeholder for a computed default until the section that holds the field is complete."""

    COMPUTED = "computed"


@dataclass(frozen=True)
class FlagFacts:
    """What a field's `flag()` says, in addition to its type."""

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
        default: value when the flag is absent; left out, the flag is required, unless its default is computed. help:
            one sentence for `--help`. **facts: the other fields of `FlagFacts`: `spelled` (more spellings; for a
            boolean, a spelling with `-no-` turns it off), `nargs` ("+": at least one value), `choices`, the bounds
            `at_least above at_most below`, `computed` (a function of the section that gives the default, and raises
            ConfigError if it cannot), `follows` (the fields a computed default depends on), `resume` (what a resume
            does with the field), `ignored` (why the flag has no effect), `remedy` (what to use instead of a value that
            is refused), `synonyms` (other words for values), `by_layer` (several values may be written, one for each
            layer; the field that takes them where they differ), `numeric` (a switch that may also be written with 1 or
            0, because upstream's takes a word), `once` (two different values are refused, where otherwise the last one
            would count, or lists of texts add up), `path` (what the flag does with the path that is its value).
    """
    if "computed" in facts:
        default = Unset.COMPUTED
    return dataclasses.field(default=default, metadata={"flag": FlagFacts(help=help, **facts)}, kw_only=True)


def network_flag(default: Any = dataclasses.MISSING, help: str = "", **facts: Any) -> Any:
    """Declares a flag that decides what the network is: a resume must match it. Takes the arguments of `flag`."""
    return flag(default, help, resume=MUST_MATCH, **facts)


def derived(help: str, *, default: Any = dataclasses.MISSING, resume: str = MAY_CHANGE) -> Any:
    """Declares a dataclass field that no flag sets: `resolve` computes it.

    Args:
        help: what it is.
        default: its value in a record of an older version, which did not have it.
        resume: what a resume does with it.
    """
    return dataclasses.field(default=default, metadata={"derived": help, "resume": resume}, kw_only=True)


@dataclass(frozen=True)
class Flag:
    """A flag of a dataclass: its name, its type and what `flag()` was given."""

    field: str
    element: type
    facts: FlagFacts
    default: Any
    required: bool
    is_tuple: bool
    count: int | None

    @property
    def name(self) -> str:
        """The flag as upstream spells it; a boolean that is on by default is known by the flag that turns it off."""
        return ("--no-" if self.default is True else "--") + self.field.replace("_", "-")

    @property
    def positive_name(self) -> str:
        return "--" + self.field.replace("_", "-")

    @functools.cached_property
    def spellings(self) -> dict[str, bool]:
        """Every accepted option string; False marks those that turn a boolean off."""
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
        """The type as `--help` shows it."""
        if not self.is_tuple:
            return self.element.__name__
        return f"{self.element.__name__} x {self.count}" if self.count else f"{self.element.__name__} ..."

    @property
    def shown_default(self) -> str:
        """The default as `--help` and the golden list show it."""
        if self.element is bool and not self.is_tuple and self.default is not None:
            return "on" if self.default else "off"
        if isinstance(self.default, tuple):
            return " ".join(str(item) for item in self.default) or "none"
        return str(self.default)

    @property
    def empty_value(self) -> Any:
        """The empty value of the flag's type: zero, false, the empty text or the empty tuple."""
        return () if self.is_tuple else self.element()


def as_written(name: str, value: Any) -> str:
    """A flag and its value as on the command line."""
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
    """What a resume does with a field of a section."""
    facts = field.metadata.get("flag")
    return facts.resume if facts is not None else field.metadata.get("resume", MAY_CHANGE)


def _read_type(hint: Any) -> tuple[type, bool, int | None]:
    """Splits a field's type into (element, whether it is a tuple, fixed length of the tuple)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        return parts[0], True, None if parts[-1] is Ellipsis else len(parts)
    return hint, False, None
