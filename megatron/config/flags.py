"""Typed dataclass fields <-> command-line flags; the only file that knows argparse.

A field declared with `flag()` becomes the flag of its name with dashes. A boolean field gets `--name` and `--no-name`,
and either may carry a word (`--eval-only false`). Everything that is wrong with a command line is collected, never just
the first thing.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import difflib
import math
import operator
import re
import types
import typing
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.errors import ConfigError

Instance = TypeVar("Instance")

MAY_CHANGE = "may change"
MUST_MATCH = "must match"
RUN_MUST_MATCH = "must match unless --finetune"
FROM_CHECKPOINT = "from the checkpoint"

_TRUE_WORDS = frozenset({"true", "yes", "on", "1"})
_FALSE_WORDS = frozenset({"false", "no", "off", "0"})
_OPTION = re.compile(r"(?<![\w-])--[\w-]*\w")
_NEGATIVE_NUMBER = re.compile(r"^-(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?$")


@dataclass(frozen=True)
class FlagFacts:
    """What `flag()` was told about one field, next to what the field's type says."""

    help: str
    spelled: tuple[str, ...] = ()
    nargs: str | int | None = None
    choices: tuple[Any, ...] = ()
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    below: float | None = None
    follows: tuple[str, ...] = ()
    resume: str = MAY_CHANGE
    ignored: str | None = None
    way_out: str = ""


def flag(default: Any = dataclasses.MISSING, help: str = "", **facts: Any) -> Any:
    """Declares a dataclass field that is also a flag.

    Args:
        default: value when the flag is absent; left out, the flag is required. None is allowed for any type: it stands
            for "derived" where the type has no None.
        help: one sentence for `--help`.
        **facts: the other fields of `FlagFacts`: `spelled` (further spellings; for a boolean one that starts with
            `--no-` turns it off), `nargs` ("+": at least one value), `choices`, the bounds `at_least above at_most
            below`, `follows` (the fields an unset value is computed from), `resume` (what a resume does with it),
            `ignored` (why giving it changes nothing), `way_out` (what to use instead of an unknown choice).
    """
    return dataclasses.field(default=default, metadata={"flag": FlagFacts(help=help, **facts)}, kw_only=True)


def derived(default: Any, help: str, *, resume: str = MAY_CHANGE) -> Any:
    """Declares a dataclass field that no flag sets: `resolve` computes it."""
    return dataclasses.field(default=default, metadata={"derived": help, "resume": resume}, kw_only=True)


@dataclass(frozen=True)
class Flag:
    """One flag of a dataclass: its name, type and what `flag()` was told."""

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
        """The flag that sets the field."""
        return "--" + self.field.replace("_", "-")

    @property
    def spellings(self) -> dict[str, bool]:
        """Every accepted option string, with False for those that turn a boolean off."""
        found = {self.positive_name: True}
        if self.element is bool:
            if not self.field.startswith("no_"):
                found["--no-" + self.field.replace("_", "-")] = False
            for text in self.facts.spelled:
                found[text] = self.field.startswith("no_") or not text.startswith("--no-")
        else:
            found.update(dict.fromkeys(self.facts.spelled, True))
        return found

    @property
    def type_name(self) -> str:
        """The type as the help shows it."""
        if not self.is_tuple:
            return self.element.__name__
        return f"{self.element.__name__} x {self.count}" if self.count else f"{self.element.__name__} ..."


def flags_of(cls: type) -> list[Flag]:
    """All flags of a dataclass, in the order of their declaration."""
    hints = typing.get_type_hints(cls)
    found = []
    for field in dataclasses.fields(cls):
        facts = field.metadata.get("flag")
        if facts is not None:
            element, is_tuple, count = _read_type(hints[field.name])
            required = field.default is dataclasses.MISSING
            found.append(
                Flag(field.name, element, facts, None if required else field.default, required, is_tuple, count)
            )
    return found


def resume_rule(field: dataclasses.Field[Any]) -> str:
    """What a resume does with a field of an area."""
    facts = field.metadata.get("flag")
    return facts.resume if facts is not None else field.metadata.get("resume", MAY_CHANGE)


class Area:
    """Base of a dataclass of flags: completes itself, then checks itself.

    Raises:
        ConfigError: a value is out of bounds, or the values contradict each other; all problems together.
    """

    def __post_init__(self) -> None:
        self.complete()
        found = self.all_problems()
        if found:
            raise ConfigError(found)

    def complete(self) -> None:
        """Fills in what follows from other fields of the same area (a frozen dataclass uses `set_derived`)."""

    def problems(self) -> Iterator[str]:
        """One sentence for every rule between the fields of this area that is broken."""
        return iter(())

    def all_problems(self) -> list[str]:
        """The broken bounds and the broken rules of this area."""
        return [*(sentence for _, sentence in bound_problems(self)), *self.problems()]

    def set_derived(self, field: str, value: Any) -> None:
        """Writes a derived value during construction."""
        object.__setattr__(self, field, value)


def bound_problems(area: Any) -> Iterator[tuple[str, str]]:
    """The name of every field whose value lies outside its bounds or choices, and a sentence that says so."""
    for one in flags_of(type(area)):
        values = getattr(area, one.field)
        for value in values if one.is_tuple and values is not None else [values]:
            if value is None:
                continue
            facts = one.facts
            if facts.choices and value not in facts.choices:
                allowed = ", ".join(str(choice) for choice in facts.choices)
                sentence = f"{one.positive_name} {value} is not known. Use one of: {allowed}."
                yield one.field, sentence + _after(facts.way_out)
            for bound, breaks, words in (
                (facts.at_least, operator.lt, "at least"),
                (facts.above, operator.le, "more than"),
                (facts.at_most, operator.gt, "at most"),
                (facts.below, operator.ge, "less than"),
            ):
                if bound is not None and breaks(value, bound):
                    sentence = f"{one.positive_name} {value} is out of range. It must be {words} {bound}."
                    yield one.field, sentence + _after(facts.way_out)


def without_instance_check(cls: type[Instance], values: Mapping[str, Any]) -> Instance:
    """Builds a frozen area without checking it, so that several areas' problems can be shown together.

    A required value that is missing is stood in for by the empty value of its type.
    """
    instance = object.__new__(cls)
    stand_ins = {one.field: _stand_in(one) for one in flags_of(cls)}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = field.default if field.default is not dataclasses.MISSING else stand_ins[field.name]
        object.__setattr__(instance, field.name, values.get(field.name, default))
    if isinstance(instance, Area):
        instance.complete()
    return instance


@dataclass
class Reading:
    """What a command line said, before any rule between the values is looked at."""

    values: dict[str, Any]  # destination -> value
    problems: list[str]
    broken: set[str]  # flags that were given but could not be read
    spellings: dict[str, str]  # destination -> the option string that was used


def read_command_line(
    flags: Mapping[str, Flag],
    argv: Sequence[str],
    *,
    prog: str | None,
    description: str,
    groups: Sequence[tuple[str, Sequence[str]]],
    epilog: str = "",
    hidden: Sequence[str] = (),
) -> Reading:
    """Reads `argv` against a set of flags; prints the help and leaves if asked to.

    Args:
        flags: destination -> flag. A destination is free text, unique over all flags.
        argv: the words after the program's name.
        prog: the program's name, None for the one the process was started with.
        description: what the program does, for the help.
        groups: (title, destinations) in the order of the help.
        epilog: printed after the flags.
        hidden: destinations that are read but not shown in the help.
    """
    parser, known = _build_parser(flags, prog, description, [*groups, (argparse.SUPPRESS, hidden)], epilog)
    namespace = argparse.Namespace(occurrences=[])
    _, extra = parser.parse_known_args(list(argv), namespace)
    reading = Reading({}, _unknown_problems(extra, known), set(), {})
    for destination, option, words in namespace.occurrences:
        one = flags[destination]
        reading.spellings[destination] = option
        try:
            reading.values[destination] = value_from_words(one, option, words)
        except ConfigError as failure:
            reading.problems.extend(failure.problems)
            reading.broken.add(one.field)
            reading.values.pop(destination, None)
    return reading


def parse_flags(cls: type[Instance], argv: Sequence[str], prog: str | None = None, description: str = "") -> Instance:
    """Reads the command line of a tool into an instance of `cls`, a dataclass of `flag()` fields.

    Raises:
        ConfigError: with all problems of the command line together.
    """
    flags = {one.field: one for one in flags_of(cls)}
    reading = read_command_line(flags, argv, prog=prog, description=description, groups=[("flags", list(flags))])
    problems = [*reading.problems, *missing_problems(flags.values(), reading.values, reading.broken)]
    missing = {one.field for one in flags.values() if one.required and one.field not in reading.values}
    instance = without_instance_check(cls, reading.values)
    problems.extend(worthwhile_problems([instance], reading.values, reading.broken | missing))
    if problems:
        raise ConfigError(problems)
    return instance


def missing_problems(flags: Iterable[Flag], values: Mapping[str, Any], broken: set[str]) -> list[str]:
    """One sentence for every required flag that has no value."""
    return [
        f"{one.positive_name} is required: {one.facts.help}."
        for one in flags
        if one.required and one.field not in values and one.field not in broken
    ]


def worthwhile_problems(
    areas: Sequence[Any], given: Container[str], refused: set[str], rules: Iterable[str] = ()
) -> list[str]:
    """The broken bounds and rules of areas, and of `rules` between them, without those that only repeat another.

    Nothing is said of a value that is `refused` already (unreadable or missing) or computed from a wrong one, and no
    rule is tried on a value that is out of bounds. `given` and `refused` hold names of fields.
    """
    bounds = [pair for area in areas for pair in bound_problems(area)]
    wrong = refused | {name for name, _ in bounds}
    computed = {
        one.field
        for area in areas
        for one in flags_of(type(area))
        if one.field not in given and wrong.intersection(one.facts.follows)
    }
    found = [sentence for name, sentence in bounds if name not in refused | computed]
    options = {"--" + name.replace("_", "-") for name in wrong | computed}
    own = [sentence for area in areas if isinstance(area, Area) for sentence in area.problems()]
    return found + [text for text in [*own, *rules] if not options.intersection(_OPTION.findall(text))]


def value_from_words(one: Flag, option: str, words: Sequence[str]) -> Any:
    """Converts the words that followed an option.

    Raises:
        ConfigError: too few or too many words, or a word that is not of the flag's type.
    """
    if one.element is bool and not one.is_tuple:
        turns_on = one.spellings.get(option, True)
        if not words:
            return turns_on
        return _one_value(one, option, words) is turns_on
    if not one.is_tuple:
        return _one_value(one, option, words)
    if one.count is not None and len(words) != one.count:
        raise ConfigError(f"{option} takes {one.count} values, {len(words)} given ({' '.join(words) or 'none'}).")
    if one.facts.nargs == "+" and not words:
        raise ConfigError(f"{option} takes at least one value; give one or drop the flag.")
    return tuple(_convert(one, option, word) for word in words)


def value_from_file(one: Flag, value: Any) -> Any:
    """Converts an entry of a configuration file.

    Raises:
        ConfigError: the entry is not of the flag's type; the text begins with what must hold.
    """
    if one.is_tuple:
        items = value if isinstance(value, list) else [value]
        if one.count is not None and len(items) != one.count:
            raise ConfigError(f"must be a list of {one.count} values, {len(items)} given")
        return tuple(_from_file(one, item) for item in items)
    return _from_file(one, value)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known spelling that resembles `name` most, if any does."""
    close = difflib.get_close_matches(name.replace("_", "-"), list(known), n=1, cutoff=0.7)
    return close[0] if close else None


def _one_value(one: Flag, option: str, words: Sequence[str]) -> Any:
    if len(words) != 1:
        given = f"{len(words)} given ({' '.join(words)})" if words else "none given"
        raise ConfigError(f"{option} takes one value, {given}.")
    return _convert(one, option, words[0])


def _convert(one: Flag, option: str, word: str) -> Any:
    if one.element is bool:
        if word.lower() in _TRUE_WORDS | _FALSE_WORDS:
            return word.lower() in _TRUE_WORDS
        raise ConfigError(f'{option} takes no value, or true or false; "{word}" is neither.')
    if one.element is str:
        if not word and one.default != "":
            raise ConfigError(f"{option} takes a text, and its value is empty. Is a variable of the script unset?")
        return word
    try:
        value = one.element(word)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        kind = "a whole number" if one.element is int else "a number"
        raise ConfigError(f'{option} takes {kind}; "{word}" is none.')
    return value


def _from_file(one: Flag, value: Any) -> Any:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}
    if one.element is float and isinstance(value, str):  # YAML 1.1 reads 1e-4 as a text
        with contextlib.suppress(ValueError):
            value = float(value)
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    if one.element is float and is_number:
        return float(value)
    if one.element is int and is_number and value == int(value):
        return int(value)
    if one.element in (bool, str) and isinstance(value, one.element):
        return value
    raise ConfigError(f"must be {names[one.element]}, not {value!r}")


def _stand_in(one: Flag) -> Any:
    return () if one.is_tuple else one.element()


def _after(sentence: str) -> str:
    return f" {sentence}" if sentence else ""


def _read_type(hint: Any) -> tuple[type, bool, int | None]:
    """Splits a field's type into (element, whether it is a tuple, fixed length of the tuple)."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        hint = next(part for part in typing.get_args(hint) if part is not type(None))
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        return parts[0], True, None if parts[-1] is Ellipsis else len(parts)
    return hint, False, None


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are ours."""

    def error(self, message: str) -> typing.NoReturn:
        raise ConfigError(f"{message}.")


class _Collect(argparse.Action):
    """Notes an option and its words; conversion comes later, so that every problem is seen."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.occurrences.append((self.dest, option_string, values))


class _HelpFormatter(argparse.HelpFormatter):
    """One line per flag: its main name and its type."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=48, width=140)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if action.nargs == 0:
            return ", ".join(action.option_strings)
        return f"{action.option_strings[0]} {action.metavar}".rstrip()

    def _format_usage(self, usage: Any, actions: Any, groups: Any, prefix: Any) -> str:
        return f"usage: {self._prog} [flags]\n\n"


def _build_parser(
    flags: Mapping[str, Flag],
    prog: str | None,
    description: str,
    groups: Sequence[tuple[str, Sequence[str]]],
    epilog: str,
) -> tuple[_Parser, list[str]]:
    parser = _Parser(
        prog=prog, description=description, epilog=epilog, allow_abbrev=False, formatter_class=_HelpFormatter
    )
    parser._negative_number_matcher = _NEGATIVE_NUMBER  # argparse's own takes -1e-3 for a flag
    known = ["--help"]
    for title, destinations in groups:
        group = parser.add_argument_group(title)
        for destination in destinations:
            one = flags[destination]
            spellings = [one.name, *(text for text in one.spellings if text != one.name)]
            known.extend(spellings)
            group.add_argument(
                *spellings,
                dest=destination,
                action=_Collect,
                nargs="*",
                default=argparse.SUPPRESS,
                metavar="" if one.element is bool and not one.is_tuple else one.type_name,
                help=argparse.SUPPRESS if title == argparse.SUPPRESS else _help_text(one),
            )
    return parser, known


def _help_text(one: Flag) -> str:
    default = "required" if one.required else f"default: {show_default(one)}"
    choices = f" {{{', '.join(str(choice) for choice in one.facts.choices)}}}" if one.facts.choices else ""
    also = [text for text in one.facts.spelled if text != one.name]
    spelled = f"; also {', '.join(also)}" if also else ""
    ignored = " [ignored]" if one.facts.ignored else ""
    return f"{one.facts.help}{choices} ({default}{spelled}){ignored}".replace("%", "%%")


def show_default(one: Flag) -> str:
    """The default as the help and the golden list show it."""
    if one.element is bool and not one.is_tuple and one.default is not None:
        return "on" if one.default else "off"
    return " ".join(str(item) for item in one.default) or "none" if isinstance(one.default, tuple) else str(one.default)


def _unknown_problems(extra: Sequence[str], known: Sequence[str]) -> list[str]:
    """Sentences about the words argparse could not place: unknown flags, and words that belong to none."""
    found: list[str] = []
    after_unknown = False
    for word in extra:
        if word.startswith("-"):
            name = word.split("=", 1)[0]
            guess = nearest(name, known)
            hint = f"Did you mean {guess}?" if guess else "See --help for the flags there are."
            found.append(f"{name} is not a flag of this program. {hint}")
            after_unknown = True
        elif not after_unknown:
            found.append(f'"{word}" belongs to no flag. Put it after the flag it is a value of.')
    return found
