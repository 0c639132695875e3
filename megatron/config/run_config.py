"""The complete configuration: all sections, the provenance of values, and rules between sections."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.config.flags.section import ConfigSection
from megatron.config.rules.checking import run_problems
from megatron.config.rules.experts import expert_notices, expert_ranks
from megatron.config.run_sections import ResolvedSections, RunSections, fields_of
from megatron.errors import ConfigError, printable

Run = TypeVar("Run", bound="RunRequest")


@dataclass(frozen=True)
class RunRequest(RunSections):
    """The requested configuration from flags and files, before the machine and the tokenizer are known.

    Raises:
        ConfigError: with all broken rules of requested and resolved runs at once.
    """

    def __post_init__(self) -> None:
        problems = list(run_problems(self))
        if problems:
            raise ConfigError(problems)
        size = expert_ranks(self.model, self.parallel)
        if size != self.parallel.expert_model_parallel_size:
            notices = (*self.notices, *expert_notices(self.model, self.parallel))
            object.__setattr__(self, "notices", notices)
            parallel = dataclasses.replace(self.parallel, expert_model_parallel_size=size)
            object.__setattr__(self, "parallel", parallel)

    def flat(self) -> dict[str, Any]:
        """All values by field name, for logs."""
        sections = (getattr(self, name) for name in sections_of(type(self)))
        return {name: value for section in sections for name, value in dataclasses.asdict(section).items()}

    def to_json(self) -> dict[str, Any]:
        """Converts the configuration to JSON values for `from_json`."""
        saved: dict[str, Any] = {
            name: plain(dataclasses.asdict(getattr(self, name))) for name in sections_of(type(self))
        }
        return {**saved, "provenance": dict(self.provenance)}

    @classmethod
    def from_json(cls: type[Run], saved: Mapping[str, Any]) -> Run:
        """Reads the result of `to_json`; fields that an older version did not have get their defaults.

        Raises:
            ConfigError: an entry is unknown (written by a newer version), or missing without a default, or a value
                breaks a rule.
        """
        sections = sections_of(cls)
        values: dict[str, dict[str, Any]] = {name: {} for name in sections}
        known = {(section, field.name) for section, kind in sections.items() for field in fields_of(kind)}
        for section, name, value in saved_fields(saved):
            if (section, name) not in known:
                raise ConfigError(
                    f"the saved configuration has {printable(f'{section}.{name}', 80, quoted=False)} = "
                    f"{printable(value, 80)}, which is unknown: it was written by a newer version. Use that version."
                )
            values[section][name] = frozen(value)
        built: dict[str, Any] = {name: _read_section(section, values[name]) for name, section in sections.items()}
        return cls(**built, provenance=dict(saved.get("provenance", {})))


@dataclass(frozen=True)
class RunConfig(ResolvedSections, RunRequest):
    """The resolved configuration of a run, with values that depend on the machine and the tokenizer."""


def sections_of(cls: type[RunSections]) -> dict[str, type[ConfigSection]]:
    """The sections of a request or of a resolved configuration by name, in the order of `--help`."""
    hints = typing.get_type_hints(cls)
    by_name = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {name: hint for name, hint in by_name.items() if isinstance(hint, type) and issubclass(hint, ConfigSection)}


def saved_fields(saved: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Yields (section, field, value) of a saved configuration.

    Raises:
        ConfigError: a section is not a mapping, or a value is not of its field's type.
    """
    for section, entries in saved.items():
        if not isinstance(entries, Mapping):
            raise ConfigError(
                f"the saved configuration has {printable(section, 80, quoted=False)} = {printable(entries, 80)}, "
                "expected fields by name. It is damaged; use another copy of it."
            )
        for name, value in entries.items():
            if section == "provenance":
                _check_saved(section, name, value, (str,))
            else:
                _check_saved(section, name, value, _field_types().get(name, ()))
                yield section, name, value


@functools.cache
def _field_types() -> Mapping[str, tuple[Any, ...]]:
    """The types of saved values by field, in requests and in resolved runs."""
    known: dict[str, tuple[Any, ...]] = {}
    for cls in (RunRequest, RunConfig):
        for section in sections_of(cls).values():
            for name, hint in typing.get_type_hints(section).items():
                known[name] = (*known.get(name, ()), hint)
    return known


def _check_saved(section: str, name: str, value: Any, hints: tuple[Any, ...]) -> None:
    if hints and not any(_is_of_type(value, hint) for hint in hints):
        expected = " or ".join(dict.fromkeys(hint.__name__ if isinstance(hint, type) else str(hint) for hint in hints))
        raise ConfigError(
            f"the saved configuration has {printable(f'{section}.{name}', 80, quoted=False)} = {printable(value, 80)}, "
            f"expected {expected}. It is damaged; use another copy of it."
        )


def _is_of_type(value: Any, hint: Any) -> bool:
    """Returns True if a value from JSON has the type of a field."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return any(_is_of_type(value, part) for part in typing.get_args(hint))
    if typing.get_origin(hint) is tuple:
        parts = typing.get_args(hint)
        if not isinstance(value, list | tuple) or (parts[-1] is not Ellipsis and len(parts) != len(value)):
            return False
        return all(_is_of_type(item, parts[0]) for item in value)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return type(value) is int
    return not isinstance(hint, type) or isinstance(value, hint)


def _read_section(section: type[ConfigSection], values: dict[str, Any]) -> ConfigSection:
    """Builds a section from saved values, with defaults for missing ones."""
    missing = [
        field.name for field in fields_of(section) if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ConfigError(f"the saved configuration lacks {', '.join(missing)}. It is damaged; use another copy of it.")
    return section(**values)


def plain(value: Any) -> Any:
    """Converts tuples to lists, as in JSON."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def frozen(value: Any) -> Any:
    """Converts lists to tuples, as in sections."""
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value
