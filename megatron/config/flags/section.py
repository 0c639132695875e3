"""Base class of configuration sections: dataclasses of flags that complete and check themselves.

All problems of a section are collected, not only the first.
"""

from __future__ import annotations

import dataclasses
import operator
import re
import types
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

from megatron.config.flags.fields import Flag, Unset, flags_of
from megatron.errors import ConfigError

Instance = TypeVar("Instance")

_AS_NAMED: Mapping[str, str] = types.MappingProxyType({})
_OPTION = re.compile(r"(?<![\w-])--[\w-]*\w")


class ConfigSection:
    """Base class for a dataclass of flags, which completes and then checks itself.

    Attributes:
        help_title: heading of its flags in the help of tools whose flags extend it.

    Raises:
        ConfigError: a value is out of bounds, or the values contradict each other; all problems at once.
    """

    help_title: ClassVar[str] = ""

    def __post_init__(self) -> None:
        self.compute_defaults()
        self.complete()
        problems = [*(sentence for _, sentence in bound_problems(self)), *self.all_problems()]
        if problems:
            raise ConfigError(problems)

    def compute_defaults(self) -> None:
        """Fills in computed defaults; `all_problems` reports those that cannot be computed."""
        for flag in flags_of(type(self)):
            if flag.facts.computed is not None and getattr(self, flag.field) is Unset.COMPUTED:
                try:
                    self.set_derived(flag.field, flag.facts.computed(self))
                except ConfigError:
                    continue

    def complete(self) -> None:
        """Sets fields that others imply (with `set_derived`, as the dataclass is frozen)."""

    def problems(self) -> Iterator[str]:
        """Yields a sentence for every broken rule between the fields of this section."""
        return iter(())

    def all_problems(self) -> Iterator[str]:
        """Yields the broken rules, and the reasons that defaults cannot be computed."""
        for flag in flags_of(type(self)):
            if flag.facts.computed is not None and getattr(self, flag.field) is Unset.COMPUTED:
                try:
                    flag.facts.computed(self)
                except ConfigError as failure:
                    yield from failure.problems
        yield from self.problems()

    def set_derived(self, field: str, value: Any) -> None:
        """Sets a derived value during construction."""
        object.__setattr__(self, field, value)


def bound_problems(section: Any, written: Mapping[str, str] = _AS_NAMED) -> Iterator[tuple[str, str]]:
    """Yields (field, sentence) for every value outside its bounds or choices.

    Args:
        written: the spelling of flags on the command line, by field.
    """
    for flag in flags_of(type(section)):
        option = written.get(flag.field, flag.positive_name)
        values = getattr(section, flag.field)
        for value in values if flag.is_tuple and values is not None else [values]:
            if value is None or value is Unset.COMPUTED:
                continue
            facts = flag.facts
            if facts.choices and value not in facts.choices:
                allowed = ", ".join(str(choice) for choice in facts.choices)
                sentence = f"{option} {value} is unknown. Use one of: {allowed}."
                yield flag.field, sentence + _after(facts.remedy)
            for bound, breaks, relation in (
                (facts.at_least, operator.lt, "at least"),
                (facts.above, operator.le, "more than"),
                (facts.at_most, operator.gt, "at most"),
                (facts.below, operator.ge, "less than"),
            ):
                if bound is not None and breaks(value, bound):
                    sentence = f"{option} {value} is out of range. It must be {relation} {bound}."
                    yield flag.field, sentence + _after(facts.remedy)


def build_unchecked(cls: type[Instance], values: Mapping[str, Any]) -> Instance:
    """Builds a section without checking it, so that problems of several sections can be reported together.

    A missing required value is replaced by the empty value of its type.
    """
    instance = object.__new__(cls)
    empty = {flag.field: flag.empty_value for flag in flags_of(cls)}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        default = field.default if field.default is not dataclasses.MISSING else empty[field.name]
        object.__setattr__(instance, field.name, values.get(field.name, default))
    if isinstance(instance, ConfigSection):
        instance.compute_defaults()
        instance.complete()
    return instance


def missing_problems(flags: Iterable[Flag], values: Mapping[str, Any], broken: set[str]) -> list[str]:
    """Returns a sentence for every required flag without a value."""
    return [
        f"{flag.positive_name} is required: {flag.facts.help}."
        for flag in flags
        if flag.required and flag.field not in values and flag.field not in broken
    ]


def relevant_problems(
    sections: Sequence[Any],
    given: Container[str],
    refused: set[str],
    rules: Iterable[str] = (),
    written: Mapping[str, str] = _AS_NAMED,
) -> list[str]:
    """Returns the broken bounds and rules of sections, and `rules` between them, without consequential errors.

    Nothing is reported about a value that is `refused` already (unreadable or missing) or computed from an invalid one,
    or about rules on a value that is out of bounds.

    Args:
        given: fields with a given value.
        refused: fields without a usable value.
        written: the spelling of flags on the command line, by field.
    """
    bounds = [pair for section in sections for pair in bound_problems(section, written)]
    invalid = refused | {name for name, _ in bounds}
    computed = {
        flag.field
        for section in sections
        for flag in flags_of(type(section))
        if flag.field not in given and invalid.intersection(flag.facts.follows)
    }
    out_of_bounds = [sentence for name, sentence in bounds if name not in refused | computed]
    options = {"--" + name.replace("_", "-") for name in invalid | computed}
    section_rules = [
        sentence for section in sections if isinstance(section, ConfigSection) for sentence in section.all_problems()
    ]
    return out_of_bounds + [
        text for text in [*section_rules, *rules] if not options.intersection(_OPTION.findall(text))
    ]


def _after(sentence: str) -> str:
    return f" {sentence}" if sentence else ""
