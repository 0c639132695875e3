"""Reading a program's own flags and, on the same line, any of the trainer's.

A program is three lines: `begin_rank()`, `read_program`, and `pretrain_gpt.train` with the words of its own flags
followed by the trainer's words, which win. What a program merely prefers to the trainer's default belongs in the
`defaults` of its `Program`, where a preset, a file or a flag wins, and not in `words`.

Upstream's tools take all of the trainer's flags as well (`parse_over`). Here the checkpoint already holds their values;
a flag that is given anyway must agree with the network, or it changes what may be changed (tokenizer files that moved,
seed, dtype, layout): `with_overrides`.
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

_OWN = "own."
_GIVEN = "_given"
# What a tool leaves as it was in training, except for the fields named.
_HOW_IT_WAS_TRAINED = frozenset(
    {"parallel", "optim", "files", "loading", "saving", "evaluation", "stopping", "safety", "report"}
)
_VOCABULARY_PADDING = frozenset({"make_vocab_size_divisible_by", "pad_vocab_size_to"})


@dataclass(frozen=True)
class ProgramFlags(ConfigSection, ABC):
    """A program's own flags."""

    @property
    def given(self) -> frozenset[str]:
        """The fields that the command line set; without one, those that differ from their defaults."""
        read = vars(self).get(_GIVEN)
        if read is not None:
            return read  # type: ignore[no-any-return]
        return frozenset(entry.field for entry in flags_of(type(self)) if getattr(self, entry.field) != entry.default)

    @abstractmethod
    def trainer_arguments(self) -> list[str]:
        """The trainer's command line that these flags translate to."""


Flags = TypeVar("Flags", bound=ProgramFlags)


def read_program(
    cls: type[Flags], argv: Sequence[str], prog: str, description: str, *, positional: str | None = None
) -> tuple[Flags, list[str]]:
    """Reads a program's command line; prints the help and exits for `--help`.

    A flag of the trainer is not available under a spelling that the program uses itself.

    Args:
        positional: the flag that words before the first flag belong to.

    Returns:
        the program's own flags, and the words of the trainer's flags as they were given.

    Raises:
        ConfigError: with everything that is wrong with the program's own flags and unknown or unreadable flags, at
            once. The rules of the trainer's flags are checked where its words are parsed.
    """
    if positional is not None and argv and not argv[0].startswith("-"):
        argv = [positional, *argv]
    instance, values, reading, problems = read_with_trainer(cls, argv, prog, description, "of the trainer")
    if problems:
        raise ConfigError(problems)
    instance.set_derived(_GIVEN, frozenset(values))
    words = [_as_written(option, given) for name, option, given in reading.occurrences if not name.startswith(_OWN)]
    return instance, [word for group in words for word in group]


def read_with_trainer(
    cls: type[Instance], argv: Sequence[str], prog: str, description: str, title: str
) -> tuple[Instance, dict[str, Any], ParsedCommandLine, list[str]]:
    """Reads a program's own flags, a dataclass of `flag()` fields, and the trainer's flags that it does not replace.

    Args:
        title: what the help writes in front of the areas of the trainer's flags.

    Returns:
        The program's own flags, unchecked; the values that were given for them; what the whole command line said; and
        what is wrong with it, except for the rules between the trainer's flags.
    """
    own = {_OWN + flag.field: flag for flag in flags_of(cls)}
    taken = {spelling for flag in own.values() for spelling in flag.spellings}
    trainer = {name: flag for name, flag in known_flags().items() if taken.isdisjoint(flag.spellings)}
    groups = [
        *((area, [_OWN + name for name in names]) for area, names in areas_of(cls)),
        *((f"{title}: {area}", [name for name in names if name in trainer]) for area, names in help_groups()),
    ]
    hidden = [name for name in legacy_flags() if name in trainer]
    reading = read_command_line(
        {**own, **trainer}, argv, prog=prog, description=description, groups=groups, hidden=hidden
    )
    values = {name.removeprefix(_OWN): value for name, value in reading.values.items() if name.startswith(_OWN)}
    missing = {flag.field for flag in own.values() if flag.required and flag.field not in values}
    instance = build_unchecked(cls, values)
    problems = [
        *reading.problems,
        *missing_problems(own.values(), values, reading.broken),
        *relevant_problems([instance], values, reading.broken | missing),
    ]
    return instance, values, reading, problems


def arguments_of(pairs: Mapping[str, Any]) -> list[str]:
    """Options with their values as words of a command line; an option whose value is None is left out."""
    given = {option: value for option, value in pairs.items() if value is not None}
    texts = {option: value if isinstance(value, str) else str(value) for option, value in given.items()}
    return [word for option, text in texts.items() for word in _as_written(option, [text])]


def flags_with_fields(argv: Sequence[str]) -> list[tuple[list[str], frozenset[str]]]:
    """Each of the trainer's flags on a command line with its values, and the fields that it sets, by "section.field".

    Unknown flags are left out.
    """
    flags = known_flags()
    reading = read_command_line(flags, argv, prog=None, description="", groups=[("", list(flags))])
    found = []
    for name, option, given in reading.occurrences:
        ((meant,), _) = expand_shorthands([{name: reading.values.get(name)}], with_defaults=False)
        found.append(([*_as_written(option, given)], frozenset(meant)))
    return found


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
        """The layout that the tool computes in, whatever the checkpoint was trained in."""
        given = {name.partition(".")[2]: value for name, value in self.given.items() if name.startswith("parallel.")}
        requested = ParallelRequest(**given)
        return without_training(requested, requested.tensor_model_parallel_size, requested.pipeline_model_parallel_size)


def parse_over(cls: type[Instance], argv: Sequence[str], prog: str, description: str = "") -> ToolRequest[Instance]:
    """Reads a command line of a tool's own flags (a dataclass of `flag()` fields) and any of the trainer's.

    Raises:
        ConfigError: with all problems of the command line at once.
    """
    title = "of the trainer, from the checkpoint unless given"
    instance, _, reading, problems = read_with_trainer(cls, argv, prog, description, title)
    (given,), contradictions = expand_shorthands([reading.values], with_defaults=False)
    problems += contradictions
    for name, entry in legacy_flags().items():
        option = reading.spellings.get(name, entry.flag.positive_name)
        sentence = entry.sentence(option, reading.values.get(name, False))
        if sentence is not None and entry.status == REFUSED:
            problems.append(sentence)
    if problems:
        raise ConfigError(problems)
    fields = field_flags()
    return ToolRequest(instance, {name: value for name, value in given.items() if name in fields})


def with_overrides(saved: RunConfig, given: Mapping[str, Any]) -> RunConfig:
    """The checkpoint's configuration with the given flags of the model and the data in it.

    How the run was trained (its batch sizes, schedule, layout and files) stays as the checkpoint says.

    Raises:
        ConfigError: a given flag contradicts the network in the checkpoint, or a value is illegal.
    """
    problems = []
    architecture = {field.name for field in fields_of(type(saved.model)) if resume_rule(field) == MUST_MATCH}
    changes: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        section, _, field_name = name.partition(".")
        if section in _HOW_IT_WAS_TRAINED and field_name not in _VOCABULARY_PADDING:
            continue
        changes.setdefault(section, {})[field_name] = value
        before = getattr(getattr(saved, section), field_name)
        if section == "model" and field_name in architecture and value != before:
            option = f"--{field_name.replace('_', '-')}"
            problems.append(
                f"{option} {value} is given, but the checkpoint holds a network with {before}. Drop {option}."
            )
    if problems:
        raise ConfigError(problems)
    precision = changes.get("precision", {})
    if precision.keys() & {"fp16", "bf16"}:
        changes["precision"] = {"fp16": False, "bf16": False, **precision}
    sections = {section: dataclasses.replace(getattr(saved, section), **values) for section, values in changes.items()}
    return dataclasses.replace(saved, **sections)
