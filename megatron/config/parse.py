"""Command line and file -> `RunConfig`: what was asked for, with all that is wrong with it shown together."""

from __future__ import annotations

import types
from collections.abc import Mapping, Sequence
from typing import Any

from megatron.config.flags import (
    Flag,
    flags_of,
    missing_problems,
    read_command_line,
    without_instance_check,
    without_repeats,
)
from megatron.config.run import AREAS, DEFAULT, GIVEN, RunConfig, cross_problems
from megatron.errors import ConfigError

_TITLES: Mapping[str, str] = types.MappingProxyType(
    {
        "model": "model",
        "parallel": "parallelism",
        "optim": "optimizer, schedule and batch sizes",
        "data": "data and tokenizer",
        "control": "checkpoints, evaluation, exits and reports",
    }
)


def known_flags() -> dict[str, Flag]:
    """Every flag of the trainer by its destination "area.field"."""
    return {f"{area}.{one.field}": one for area, cls in AREAS.items() for one in flags_of(cls)}


def parse(argv: Sequence[str], prog: str | None = None) -> RunConfig:
    """Reads the trainer's command line.

    Raises:
        ConfigError: with all problems together.
    """
    flags = known_flags()
    groups = [(title, [name for name in flags if name.startswith(f"{area}.")]) for area, title in _TITLES.items()]
    reading = read_command_line(flags, argv, prog=prog, description="Pretrains a GPT language model.", groups=groups)
    values, problems = reading.values, list(reading.problems)
    areas: dict[str, Any] = {}
    provenance = {name: GIVEN if name in values else DEFAULT for name in flags}
    silent: set[str] = set(reading.broken)
    for area, cls in AREAS.items():
        own = {name: one for name, one in flags.items() if name.startswith(f"{area}.")}
        given = {one.field: values[name] for name, one in own.items() if name in values}
        problems.extend(missing_problems(own.values(), given, reading.broken))
        silent.update(one.field for name, one in own.items() if one.required and name not in values)
        areas[area] = without_instance_check(cls, given)
    for instance in areas.values():
        problems.extend(without_repeats(instance.all_problems(), silent))
    problems.extend(without_repeats(cross_problems(areas["model"], areas["parallel"]), silent))
    if problems:
        raise ConfigError(problems)
    return RunConfig(**areas, provenance=provenance)
