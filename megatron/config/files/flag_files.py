"""Files with flags: `--config`, model presets, and files with blends of data sources."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.flags.command_line import check_paths, nearest, shown_value, value_from_file
from megatron.config.flags.fields import Flag, flag
from megatron.config.flags.paths import PathUse
from megatron.config.flags.section import ConfigSection
from megatron.errors import ConfigError
from megatron.files.settings import read_json, read_text, read_yaml
from megatron.secret_text import guarded, masked


@dataclass(frozen=True)
class FlagFilesConfig(ConfigSection):
    """Sources of flags besides the command line."""

    model_preset: str | None = flag(
        None,
        "published architecture, by the name of a file in examples/configs; --config and the command line override it",
    )
    config: str | None = flag(
        None, "JSON or YAML file with flags by name; the command line overrides it", once=True, path=PathUse.FILE
    )


_MAX_UNKNOWN_SHOWN = 20  # finding the closest key takes a millisecond each
_LONGEST_KEY = 80
_RECORD_ENTRIES = ("provenance", "notices")


@dataclass
class ParsedFlagFile:
    """The values in a file of flags, and its problems."""

    values: dict[str, Any] = field(default_factory=dict)  # destination -> value
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # fields whose entry could not be used


def read_config_file(path: str, flags: Mapping[str, Flag], sections: Collection[str]) -> ParsedFlagFile:
    """Reads a file of flags.

    Keys are flag names with dashes or underscores, at the top level or under the name of a section. From a run's
    `config.json` only the values given to that run are read; the rest is derived again.

    Args:
        path: JSON if it ends in .json, otherwise YAML (a superset of JSON).
        flags: destination ("section.field") -> flag.
        sections: names under which entries may be grouped.
    """
    parsed = ParsedFlagFile()
    try:
        tree = _load(path)
    except ConfigError as failure:
        parsed.problems.extend(failure.problems)
        return parsed
    by_key = {
        name.lstrip("-").replace("-", "_"): destination
        for destination, flag in flags.items()
        for name in flag.spellings
    }
    unknown = []
    for key, value in _entries(tree, sections):
        destination = by_key.get(key.replace("-", "_"))
        if destination is None:
            unknown.append(key)
        else:
            _read_entry(path, key, destination, flags[destination], value, parsed)
    for key in unknown[:_MAX_UNKNOWN_SHOWN]:
        guess = nearest(key[:_LONGEST_KEY].replace("-", "_"), list(by_key))
        hint = f'Did you mean "{guess}"?' if guess else "Keys are the flags of --help without leading dashes."
        parsed.problems.append(f'{path}: the key "{masked(key[:_LONGEST_KEY])}" is unknown. {hint}')
    if len(unknown) > _MAX_UNKNOWN_SHOWN:
        parsed.problems.append(
            f"{path}: {len(unknown) - _MAX_UNKNOWN_SHOWN} more keys are unknown. Is it the right file?"
        )
    return parsed


def _read_entry(path: str, key: str, destination: str, flag: Flag, value: Any, parsed: ParsedFlagFile) -> None:
    if value is None:
        return
    if destination in parsed.values or flag.field in parsed.broken:
        parsed.problems.append(f'{path}: "{key}" sets the same flag as another key. Keep one of them.')
        return
    try:
        setting: Any = value_from_file(flag, value)
        negated = flag.element is bool and not flag.spellings.get("--" + key.replace("_", "-"), True)
        setting = (not setting) if negated else setting
        for item in setting if flag.is_tuple else [setting]:
            if flag.facts.choices and item not in flag.facts.choices:
                raise ConfigError(f"must be one of {', '.join(map(str, flag.facts.choices))}, not {shown_value(item)}")
    except ConfigError as failure:
        parsed.broken.add(flag.field)
        parsed.problems.append(f'{path}: "{key}" {failure}.')
        return
    try:
        check_paths(flag, f'{path}: "{key}"', setting)
        parsed.values[destination] = setting
    except ConfigError as failure:
        parsed.broken.add(flag.field)
        parsed.problems.extend(failure.problems)


def _entries(tree: Mapping[str, Any], sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    provenance = tree.get("provenance")
    for key, value in tree.items():
        if key in sections and isinstance(value, Mapping):
            for inner, item in value.items():
                if not isinstance(provenance, Mapping) or provenance.get(f"{key}.{inner}", "default") != "default":
                    yield str(inner), item
        elif key not in _RECORD_ENTRIES:
            yield str(key), value


def _load(path: str) -> Mapping[str, Any]:
    name = f"--config {path}"
    tree = read_json(path, name) if path.endswith(".json") else read_yaml(path, name)
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{name} must contain a mapping of flag names to values, not {type(tree).__name__}.")
    return tree


_MOST_SHOWN = 6


def preset_path(name: str) -> Path:
    """The file of a preset; hyphens in the name are optional: llama3-70b for llama-3-70b.

    Raises:
        ConfigError: the preset is unknown.
    """
    folder, names = _folder(), preset_names()
    spelled = [other for other in names if name == other or name.replace("-", "") == other.replace("-", "")]
    if spelled:
        return folder / f"{name if name in spelled else spelled[0]}.yaml"
    near = difflib.get_close_matches(name.lower(), names, n=_MOST_SHOWN, cutoff=0.5)
    if not near:
        near = sorted({other.partition("-")[0] + "-..." for other in names})
    raise ConfigError(
        f"--model-preset {name} is unknown. Similar: {', '.join(near)}. All {len(names)} are the files in {folder}; "
        "--config FILE reads any file of flags."
    )


def preset_names() -> list[str]:
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def _folder() -> Path:
    """`examples/configs` of the repository, installed as `presets` in the package."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "presets"
    return installed if installed.is_dir() else package.parent / "examples" / "configs"


def read_group_files(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replaces each `--*-weighted-split-paths-path FILE` by the groups in the file.

    Source: the file format is bigscience Megatron-DeepSpeed's: one line, each group in double quotes, separated by
    blanks.
    """
    complete, problems = dict(values), []
    for split in ("train", "valid", "test"):
        destination = f"data.{split}_weighted_split_paths"
        path = values.get(f"{destination}_path")
        if path is None:
            continue
        name = f"--{split}-weighted-split-paths"
        if destination in values:
            problems.append(f"{name} and {name}-path are both given. Drop one of them.")
            continue
        try:
            complete[destination] = _read_group_file(path, f"{name}-path")
        except ConfigError as failure:
            problems.extend(failure.problems)
    return complete, problems


def _read_group_file(path: str, name: str) -> tuple[str, ...]:
    line = read_text(path, f"{name} {path}").strip()
    if len(line.splitlines()) != 1 or len(line) < 2 or line[0] != '"' or line[-1] != '"':
        raise ConfigError(
            f'{name} {path} must contain one line of groups in double quotes: "NAME: W S:E PREFIX" "NAME: ...".'
        )
    return tuple(map(guarded, line[1:-1].split('" "')))
