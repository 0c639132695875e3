"""Parsing of a program's own flags together with the trainer's.

A program calls `begin_rank()`, `read_program`, and `pretrain_gpt.train` with the arguments from its own flags
followed by the trainer's arguments, which override them. Defaults that presets and files may override belong in the
`defaults` of its `Program`, not in `trainer_arguments`.

Tools accept the trainer's flags as well, as upstream's do (`parse_over`). The checkpoint holds their values; a given
flag must match the network, or overrides what may change: tokenizer files, seed, dtype, layout (`with_overrides`).
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from megatron.config.flags.command_line import ParsedCommandLine, areas_of, read_command_line
from megatron.config.flags.fields import MUST_MATCH, flags_of, resume_rule
from megatron.config.flags.legacy import legacy_flags
from megatron.config.flags.section import ConfigSection, Instance, build_unchecked, missing_problems, relevant_problems
from megatron.config.flags.shorthands import expand_shorthands
from megatron.config.flags.status_table import REFUSED
from megatron.config.parse import field_flags, help_groups, known_flags
from megatron.config.run_config import RunConfig
from megatron.config.run_sections import fields_of
from megatron.config.sections.parallel import ParallelRequest, without_training
from megatron.errors import ConfigError
from megatron.secret_text import reveal

_PROGRAM = "program."
_GIVEN = "_given"
# Sections that a tool does not override, except for _VOCABULARY_PADDING.
_TRAINING_SECTIONS = frozenset(
    {"parallel", "optim", "files", "loading", "saving", "evaluation", "stopping", "safety", "report"}
)
_VOCABULARY_PADDING = frozenset({"make_vocab_size_divisible_by", "pad_vocab_size_to"})


@dataclass(frozen=True)
class ProgramFlags(ConfigSection, ABC):
    """A program's own flags."""

    @property
    def given(self) -> frozenset[str]:
        """The fields set on the command line; without one, those that differ from their defaults."""
        given = vars(self).get(_GIVEN)
        if given is not None:
            return given  # type: ignore[no-any-return]
        return frozenset(entry.field for entry in flags_of(type(self)) if getattr(self, entry.field) != entry.default)

    @abstractmethod
    def trainer_arguments(self) -> list[str]:
        """The arguments of the trainer that these flags translate to."""


Flags = TypeVar("Flags", bound=ProgramFlags)


def read_program(
    cls: type[Flags], argv: Sequence[str], prog: str, description: str, *, positional: str | None = None
) -> tuple[Flags, list[str]]:
    """Parses a program's command line; prints the help and exits for `--help`.

    Spellings of the program's own flags hide the trainer's.

    Args:
        positional: the flag that receives arguments before the first flag.

    Returns:
        The program's own flags, and the arguments for the trainer.

    Raises:
        ConfigError: with all problems of the program's own flags, and all unknown or unreadable flags. Rules of the
            trainer's flags are checked where its arguments are parsed.
    """
    if positional is not None and argv and not argv[0].startswith("-"):
        argv = [positional, *argv]
    instance, values, parsed, problems = read_with_trainer(cls, argv, prog, description, "of the trainer")
    if problems:
        raise ConfigError(problems)
    instance.set_derived(_GIVEN, frozenset(values))
    groups = [_as_written(option, given) for name, option, given in parsed.occurrences if not name.startswith(_PROGRAM)]
    return instance, [argument for group in groups for argument in group]


def read_with_trainer(
    cls: type[Instance], argv: Sequence[str], prog: str, description: str, title: str
) -> tuple[Instance, dict[str, Any], ParsedCommandLine, list[str]]:
    """Parses a program's own flags, a dataclass of `flag()` fields, and the trainer's flags that they do not hide.

    Args:
        title: prefix of the help groups of the trainer's flags.

    Returns:
        The program's own flags, unchecked; the values given for them; the parsed command line; and its problems,
        without those of rules between the trainer's flags.
    """
    program = {_PROGRAM + flag.field: flag for flag in flags_of(cls)}
    taken = {spelling for flag in program.values() for spelling in flag.spellings}
    trainer = {name: flag for name, flag in known_flags().items() if taken.isdisjoint(flag.spellings)}
    groups = [
        *((area, [_PROGRAM + name for name in names]) for area, names in areas_of(cls)),
        *((f"{title}: {area}", [name for name in names if name in trainer]) for area, names in help_groups()),
    ]
    hidden = [name for name in legacy_flags() if name in trainer]
    parsed = read_command_line(
        {**program, **trainer}, argv, prog=prog, description=description, groups=groups, hidden=hidden
    )
    values = {name.removeprefix(_PROGRAM): value for name, value in parsed.values.items() if name.startswith(_PROGRAM)}
    missing = {flag.field for flag in program.values() if flag.required and flag.field not in values}
    instance = build_unchecked(cls, values)
    problems = [
        *parsed.problems,
        *missing_problems(program.values(), values, parsed.broken),
        *relevant_problems([instance], values, parsed.broken | missing),
    ]
    return instance, values, parsed, problems


def arguments_of(pairs: Mapping[str, Any]) -> list[str]:
    """Command-line arguments for options and their values; options whose value is None are skipped."""
    given = {option: value for option, value in pairs.items() if value is not None}
    texts = {option: value if isinstance(value, str) else str(value) for option, value in given.items()}
    return [argument for option, text in texts.items() for argument in _as_written(option, [text])]


def flags_with_fields(argv: Sequence[str]) -> list[tuple[list[str], frozenset[str]]]:
    """The trainer's flags on a command line: the arguments of each, and the fields it sets, as "section.field".

    Skips unknown flags.
    """
    flags = known_flags()
    parsed = read_command_line(flags, argv, prog=None, description="", groups=[("", list(flags))])
    flags_and_fields = []
    for name, option, given in parsed.occurrences:
        ((expanded,), _) = expand_shorthands([{name: parsed.values.get(name)}], with_defaults=False)
        flags_and_fields.append(([*_as_written(option, given)], frozenset(expanded)))
    return flags_and_fields


def _as_written(option: str, given: Sequence[str]) -> Iterator[str]:
    """An option and its values; a single value that looks like an option stays joined to it."""
    if len(given) == 1 and given[0].startswith("-"):
        yield f"{option}={reveal(given[0])}"
    else:
        yield option
        yield from given


@dataclass(frozen=True)
class ToolRequest(Generic[Instance]):
    """The tool's own flags, and the trainer's flags that were given, by "section.field"."""

    flags: Instance
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> ParallelRequest:
        """The layout of the tool, independent of the checkpoint's."""
        given = {name.partition(".")[2]: value for name, value in self.given.items() if name.startswith("parallel.")}
        requested = ParallelRequest(**given)
        return without_training(requested, requested.tensor_model_parallel_size, requested.pipeline_model_parallel_size)


def parse_over(cls: type[Instance], argv: Sequence[str], prog: str, description: str = "") -> ToolRequest[Instance]:
    """Parses a command line of a tool's own flags (a dataclass of `flag()` fields) and any of the trainer's.

    Raises:
        ConfigError: with all problems of the command line at once.
    """
    title = "of the trainer, from the checkpoint unless given"
    instance, _, parsed, problems = read_with_trainer(cls, argv, prog, description, title)
    (given,), contradictions = expand_shorthands([parsed.values], with_defaults=False)
    problems += contradictions
    for name, entry in legacy_flags().items():
        option = parsed.spellings.get(name, entry.flag.positive_name)
        sentence = entry.sentence(option, parsed.values.get(name, False))
        if sentence is not None and entry.status == REFUSED:
            problems.append(sentence)
    if problems:
        raise ConfigError(problems)
    fields = field_flags()
    return ToolRequest(instance, {name: value for name, value in given.items() if name in fields})


def with_overrides(saved: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """The checkpoint's configuration, with the given flags of the model and the data applied.

    Batch sizes, schedule, layout and files of the training run are kept.

    Raises:
        ConfigError: a given flag contradicts the network in the checkpoint, or a value is invalid.
    """
    problems = []
    architecture = {field.name for field in fields_of(type(saved.model)) if resume_rule(field) == MUST_MATCH}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        section, _, field_name = name.partition(".")
        if section in _TRAINING_SECTIONS and field_name not in _VOCABULARY_PADDING:
            continue
        changes.setdefault(section, {})[field_name] = value
        before = getattr(getattr(saved, section), field_name)
        if section == "model" and field_name in architecture and value != before:
            option = f"--{field_name.replace('_', '-')}"
            problems.append(f"{option} {value} contradicts the checkpoint, whose network has {before}. Drop {option}.")
    if problems:
        raise ConfigError(problems)
    precision = changes.get("precision", {})
    if precision.keys() & {"fp16", "bf16"}:
        changes["precision"] = {"fp16": False, "bf16": False, **precision}
    sections = {section: dataclasses.replace(getattr(saved, section), **values) for section, values in changes.items()}
    return dataclasses.replace(saved, **sections)
