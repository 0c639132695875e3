"""A tool's command line, which may also contain the trainer's flags, over the configuration of a checkpoint.

Upstream's tools take all of the trainer's flags. Here the checkpoint already holds their values; a flag that is given
anyway must agree with the network, or it changes what may be changed (tokenizer files that moved, seed, dtype, layout).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic

from megatron.config.flags.fields import MUST_MATCH, resume_rule
from megatron.config.flags.legacy import REFUSED, legacy_flags
from megatron.config.flags.section import Instance
from megatron.config.flags.shorthands import expand_shorthands
from megatron.config.parse import field_flags
from megatron.config.program_flags import read_with_trainer
from megatron.config.run import RunConfig, fields_of
from megatron.config.sections.parallel import ParallelRequest
from megatron.errors import ConfigError

# What a tool leaves as it was in training, except for the fields named.
_HOW_IT_WAS_TRAINED = frozenset(
    {"parallel", "optim", "files", "loading", "saving", "evaluation", "stopping", "safety", "report"}
)
_VOCABULARY_PADDING = frozenset({"make_vocab_size_divisible_by", "pad_vocab_size_to"})


@dataclass(frozen=True)
class ToolRequest(Generic[Instance]):
    """The tool's own flags, and the trainer's flags that were given, by "section.field"."""

    own: Instance
    given: Mapping[str, Any] = field(default_factory=dict)

    @property
    def layout(self) -> ParallelRequest:
        """The layout that the tool computes in, whatever the checkpoint was trained in."""
        own = {name.partition(".")[2]: value for name, value in self.given.items() if name.startswith("parallel.")}
        return ParallelRequest(**own)


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


def laid_over(saved: RunConfig, given: Mapping[str, Any]) -> RunConfig:
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
