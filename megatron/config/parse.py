"""Command line and file -> `RunConfig`: what was asked for, with all that is wrong with it shown together."""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from megatron.config.config_file import FileReading, read_config_file
from megatron.config.deepspeed_file import DeepSpeedReading, governed_values
from megatron.config.flags import (
    Flag,
    flags_of,
    missing_problems,
    read_command_line,
    show_default,
    without_instance_check,
    worthwhile_problems,
)
from megatron.config.legacy import DEPRECATED, IGNORED, REFUSED, SUPPORTED, Legacy, legacy_flags
from megatron.config.request import read_group_files, request_problems
from megatron.config.run import AREAS, DEFAULT, FILE, GIVEN, RunConfig, cross_problems
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
_DESCRIPTION = "Pretrains a GPT language model with tensor, pipeline and data parallelism."


def field_flags() -> dict[str, Flag]:
    """Every flag that sets a field, by its destination "area.field"."""
    return {f"{area}.{one.field}": one for area, cls in AREAS.items() for one in flags_of(cls)}


def parse(argv: Sequence[str], prog: str | None = None) -> RunConfig:
    """Reads the trainer's command line, and the file of `--config` if one is given.

    Looks at nothing but the words and the files they name: no torch, no environment, no network. Prints the help and
    leaves the process for `--help`.

    Raises:
        ConfigError: with all problems together.
    """
    own, legacy = field_flags(), legacy_flags()
    flags = {**own, **{name: entry.flag for name, entry in legacy.items()}}
    groups = [(title, [name for name in own if name.startswith(f"{area}.")]) for area, title in _TITLES.items()]
    reading = read_command_line(
        flags, argv, prog=prog, description=_DESCRIPTION, groups=groups, epilog=_epilog(legacy), hidden=list(legacy)
    )
    file = FileReading()
    if "control.config" in reading.values:
        file = read_config_file(reading.values["control.config"], flags, AREAS)
    values = {**file.values, **reading.values}
    problems, broken = [*reading.problems, *file.problems], reading.broken | file.broken
    governed = DeepSpeedReading()
    if "parallel.deepspeed_config" in values:
        governed = governed_values(values["parallel.deepspeed_config"], own, values)
        values, broken = {**governed.values, **values}, broken | governed.broken
        problems += governed.problems
    provenance = {name: GIVEN if name in reading.values else FILE if name in values else DEFAULT for name in own}
    notices = [*_deprecated_notices(reading.spellings.values()), *governed.notices]
    for name, entry in legacy.items():
        sentence = entry.sentence(reading.spellings.get(name, entry.flag.positive_name), values.get(name, False))
        if sentence is not None:
            (problems if entry.status == REFUSED else notices).append(sentence)
    values, group_problems = read_group_files(values)
    areas, area_problems = _build_areas(own, values, provenance, broken)
    problems += [*group_problems, *area_problems]
    if problems:
        raise ConfigError(problems)
    notices += _ignored_notices(own, values)
    return RunConfig(**areas, provenance=provenance, notices=tuple(notices))


def flag_table() -> list[tuple[str, str, str, str]]:
    """Name, type, default and status of every flag the trainer knows, in the order of the help."""
    rows = [
        (one.name, one.type_name, show_default(one), IGNORED if one.facts.ignored else SUPPORTED)
        for one in field_flags().values()
    ]
    others = [
        (entry.flag.positive_name, entry.flag.type_name, show_default(entry.flag), entry.status)
        for entry in legacy_flags().values()
    ]
    return rows + sorted(others, key=lambda row: (row[3], row[0]))


def _build_areas(
    own: Mapping[str, Flag], values: Mapping[str, Any], provenance: Mapping[str, str], broken: set[str]
) -> tuple[dict[str, Any], list[str]]:
    """Builds every area and lists what is wrong with them, leaving out values that are refused already."""
    missing = [one for name, one in own.items() if one.required and name not in values]
    problems = missing_problems(missing, {}, broken)
    areas: dict[str, Any] = {}
    for area, cls in AREAS.items():
        fields = {one.field: values[f"{area}.{one.field}"] for one in flags_of(cls) if f"{area}.{one.field}" in values}
        areas[area] = without_instance_check(cls, fields)
    rules = [
        *cross_problems(areas["model"], areas["parallel"]),
        *request_problems(areas["optim"], areas["data"], areas["control"], provenance),
    ]
    given = {name.partition(".")[2] for name in values}
    refused = broken | {one.field for one in missing}
    return areas, problems + worthwhile_problems(list(areas.values()), given, refused, rules)


def _ignored_notices(own: Mapping[str, Flag], values: Mapping[str, Any]) -> Iterator[str]:
    for name, one in own.items():
        if one.facts.ignored and name in values and values[name] != one.default:
            yield f"{one.name} is accepted and ignored: {one.facts.ignored}."
    method = values.get("parallel.pp_partition_method")
    if method is not None and "embedding" in method:
        yield f"--pp-partition-method {method}: embeddings are not counted; blocks are spread evenly."


def _deprecated_notices(spellings: Any) -> Iterator[str]:
    for option in spellings:
        if option in DEPRECATED:
            yield f"{option} is deprecated: {DEPRECATED[option]}"


def _epilog(legacy: Mapping[str, Legacy]) -> str:
    def names(status: str) -> str:
        return " ".join(sorted(entry.flag.positive_name for entry in legacy.values() if entry.status == status))

    return f"Accepted with a warning and ignored: {names(IGNORED)}. Refused, each with the way out: {names(REFUSED)}."
