"""The whole configuration: its sections, where each value came from, and the rules between sections."""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from megatron.config.flags.fields import flags_of
from megatron.config.flags.section import ConfigSection
from megatron.config.rules.checking import run_problems
from megatron.config.rules.experts import expert_notices, expert_ranks
from megatron.config.run_sections import ResolvedSections, RunSections, fields_of
from megatron.config.sections.model import ModelRequest
from megatron.errors import ConfigError, printable

FORMER_SECTIONS = ("control",)  # of older versions, in files of flags and in saved configurations

Run = TypeVar("Run", bound="RunRequest")


@dataclass(frozen=True)
class RunRequest(RunSections):
    """What was asked for: the flags and files of a run, before the machine and the tokenizer are known.

    Raises:
        ConfigError: a rule is broken that holds for resolved runs too; all problems at once.
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
        """Every value by the name of its field, for logs."""
        sections = (getattr(self, name) for name in sections_of(type(self)))
        return {name: value for section in sections for name, value in dataclasses.asdict(section).items()}

    def to_json(self) -> dict[str, Any]:
        """The configuration as JSON values; `from_json` reads it back."""
        saved: dict[str, Any] = {
            name: plain(dataclasses.asdict(getattr(self, name))) for name in sections_of(type(self))
        }
        return {**saved, "provenance": dict(self.provenance)}

    @classmethod
    def from_json(cls: type[Run], saved: Mapping[str, Any]) -> Run:
        """Reads what `to_json` wrote; entries that an older version did not have get their defaults.

        A field is found by its name, in whichever section it was saved: older versions had fewer sections.

        Raises:
            ConfigError: an entry is unknown, so the text was written by a newer version, or is missing and has no
                default, or a value breaks a rule.
        """
        sections = sections_of(cls)
        places = _sections_by_field()
        values: dict[str, dict[str, Any]] = {name: {} for name in sections}
        for section, name, value in saved_fields(saved):
            if name not in places:
                raise ConfigError(
                    f"the saved configuration has {printable(f'{section}.{name}', 80, quoted=False)} = "
                    f"{printable(value, 80)}, which this version does not know. It "
                    "was written by a newer version; use that one."
                )
            values[places[name]][name] = frozen(value)
        provenance = {
            f"{places[name]}.{name}": source
            for name, source in ((key.partition(".")[2], source) for key, source in saved.get("provenance", {}).items())
            if name in places
        }
        built: dict[str, Any] = {name: _read_section(section, values[name]) for name, section in sections.items()}
        return cls(**built, provenance=provenance)


@dataclass(frozen=True)
class RunConfig(ResolvedSections, RunRequest):
    """The resolved configuration of a run: what was asked for, with all that the machine and the tokenizer decide."""


def sections_of(cls: type[RunSections]) -> dict[str, type[ConfigSection]]:
    """The sections of a request or of a resolved configuration by name, in the order of `--help`."""
    hints = typing.get_type_hints(cls)
    by_name = {field.name: hints[field.name] for field in dataclasses.fields(cls)}
    return {name: hint for name, hint in by_name.items() if isinstance(hint, type) and issubclass(hint, ConfigSection)}


def in_current_sections(saved: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration with each field in the section it has now; older versions divided them differently."""
    places, moved = _sections_by_field(), dict[str, Any]()
    for section, entries in saved.items():
        if section == "provenance" and isinstance(entries, Mapping):
            names = {key: key.partition(".")[2] for key in entries}
            moved[section] = {
                f"{places[names[key]]}.{names[key]}" if names[key] in places else key: source
                for key, source in entries.items()
            }
        elif isinstance(entries, Mapping):
            for name, value in entries.items():
                moved.setdefault(places.get(name, section), {})[name] = value
        else:
            moved[section] = entries
    return moved


@functools.cache
def _sections_by_field() -> Mapping[str, str]:
    return {field.name: name for name, section in sections_of(RunConfig).items() for field in fields_of(section)}


def saved_fields(saved: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """(section, field, value) of a saved configuration, in whatever way its version divided the fields.

    Raises:
        ConfigError: a section is no mapping, or a value is not of its field's type.
    """
    for section, entries in saved.items():
        if not isinstance(entries, Mapping):
            raise ConfigError(
                f"the saved configuration has {printable(section, 80, quoted=False)} = {printable(entries, 80)}, which "
                "should hold fields by name. It is damaged; use another copy of it."
            )
        for name, value in entries.items():
            if section == "provenance":
                _check_saved(section, name, value, (str,))
            else:
                _check_saved(section, name, value, _field_types().get(name, ()))
                yield section, name, value
        if entries.get("moe_router_score_function") == "sigmoid" and "moe_router_keep_scores" not in entries:
            # Older versions kept the scores with this flag, which Megatron-LM reads beside softmax only.
            yield section, "moe_router_keep_scores", entries.get("moe_router_pre_softmax", False)


@functools.cache
def _field_types() -> Mapping[str, tuple[Any, ...]]:
    """What a saved value of each field may be: what it is in a request, or resolved; and for what is required null."""
    known: dict[str, tuple[Any, ...]] = {}
    for cls in (RunRequest, RunConfig):
        for section in sections_of(cls).values():
            hints = typing.get_type_hints(section)
            required = {
                flag.field for flag in flags_of(section) if flag.required and not issubclass(section, ModelRequest)
            }
            for name in (entry.name for entry in fields_of(section)):
                known[name] = (*known.get(name, ()), hints[name], *([type(None)] if name in required else []))
    return known


def _check_saved(section: str, name: str, value: Any, hints: tuple[Any, ...]) -> None:
    if hints and not any(_is_of_type(value, hint) for hint in hints):
        wanted = " or ".join(dict.fromkeys(hint.__name__ if isinstance(hint, type) else str(hint) for hint in hints))
        raise ConfigError(
            f"the saved configuration has {printable(f'{section}.{name}', 80, quoted=False)} = {printable(value, 80)}, "
            f"which should be {wanted}. It is damaged; use another copy of it."
        )


def _is_of_type(value: Any, hint: Any) -> bool:
    """Whether a value as JSON gives it back is one of a field's type."""
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
    """Builds a section from saved values; older versions wrote null for a number that a run did not have."""
    required = {flag.field: flag for flag in flags_of(section) if flag.required}
    values = {
        name: required[name].empty_value if value is None and name in required else value
        for name, value in values.items()
    }
    missing = [
        field.name for field in fields_of(section) if field.default is dataclasses.MISSING and field.name not in values
    ]
    if missing:
        raise ConfigError(f"the saved configuration lacks {', '.join(missing)}. It is damaged; use another copy of it.")
    return section(**values)


def plain(value: Any) -> Any:
    """Tuples as lists, the way JSON gives them back."""
    if isinstance(value, dict):
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, tuple) else value


def frozen(value: Any) -> Any:
    """Lists as tuples, the way the sections hold them."""
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value
