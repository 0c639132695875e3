"""`--config FILE`: flags by name from JSON or YAML; the only file that knows yaml."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron.config.flags.command_line import nearest, value_from_file
from megatron.config.flags.fields import Flag
from megatron.errors import ConfigError

_OWN_ENTRIES = ("provenance", "notices")


@dataclass
class FileReading:
    """What a configuration file said."""

    values: dict[str, Any] = field(default_factory=dict)  # destination -> value
    problems: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)  # fields whose entry could not be used


def read_config_file(path: str, flags: Mapping[str, Flag], sections: Collection[str]) -> FileReading:
    """Reads a file of flags.

    Keys are flag names with dashes or underscores, at the top or under the name of a section. A `config.json` that a
    run wrote is such a file: only what was given to that run is taken from it, so that the rest is derived again.

    Args:
        path: JSON if it ends in .json, otherwise YAML (of which JSON is a part).
        flags: destination ("section.field") -> flag.
        sections: names under which entries may be grouped.
    """
    reading = FileReading()
    try:
        tree = _load(path)
    except ConfigError as failure:
        reading.problems.extend(failure.problems)
        return reading
    by_key = {name.lstrip("-").replace("-", "_"): place for place, flag in flags.items() for name in flag.spellings}
    for key, value in _entries(tree, sections):
        place = by_key.get(key.replace("-", "_"))
        if place is None:
            guess = nearest(key.replace("-", "_"), (name.replace("-", "_") for name in by_key)) or ""
            hint = f'Did you mean "{guess}"?' if guess else "Keys are the flags of --help without the leading dashes."
            reading.problems.append(f'{path}: the key "{key}" is not a flag. {hint}')
            continue
        _read_entry(path, key, place, flags[place], value, reading)
    return reading


def _read_entry(path: str, key: str, place: str, flag: Flag, value: Any, reading: FileReading) -> None:
    if value is None:
        return
    if place in reading.values or flag.field in reading.broken:
        reading.problems.append(f'{path}: "{key}" sets the same flag as another key. Keep one of them.')
        return
    try:
        found: Any = value_from_file(flag, value)
        turned = flag.element is bool and not flag.spellings.get("--" + key.replace("_", "-"), True)
        found = (not found) if turned else found
        for item in found if flag.is_tuple else [found]:
            if flag.facts.choices and item not in flag.facts.choices:
                raise ConfigError(f"must be one of {', '.join(map(str, flag.facts.choices))}, not {item!r}")
        reading.values[place] = found
    except ConfigError as failure:
        reading.broken.add(flag.field)
        reading.problems.append(f'{path}: "{key}" {failure}.')


def _entries(tree: Mapping[str, Any], sections: Collection[str]) -> Iterator[tuple[str, Any]]:
    provenance = tree.get("provenance")
    for key, value in tree.items():
        if key in sections and isinstance(value, Mapping):
            for inner, item in value.items():
                if not isinstance(provenance, Mapping) or provenance.get(f"{key}.{inner}", "default") != "default":
                    yield str(inner), item
        elif key not in _OWN_ENTRIES:
            yield str(key), value


def _load(path: str) -> Mapping[str, Any]:
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as failure:
        raise ConfigError(
            f"--config {path} cannot be read: {failure.strerror}. Give a readable JSON or YAML file."
        ) from None
    except UnicodeDecodeError as failure:
        raise ConfigError(f"--config {path} is not UTF-8 text: {failure.reason} at byte {failure.start}.") from None
    tree = _load_json(path, text) if path.endswith(".json") else _load_yaml(path, text)
    if tree is None:
        return {}
    if not isinstance(tree, Mapping):
        raise ConfigError(
            f"--config {path} holds a {type(tree).__name__}. It must hold a mapping of flag names to values."
        )
    return tree


def _load_json(path: str, text: str) -> Any:
    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise ConfigError(f'--config {path} has the key "{key}" twice. Keep one of them.')
            found[key] = value
        return found

    try:
        return json.loads(text, object_pairs_hook=refuse_repeats)
    except (ValueError, RecursionError) as failure:
        raise ConfigError(f"--config {path} is not JSON: {failure}. Fix the file.") from None


def _load_yaml(path: str, text: str) -> Any:
    try:
        import yaml
    except ImportError:
        raise ConfigError(
            f"--config {path}: YAML needs PyYAML. Run pip install pyyaml, or write the file as .json."
        ) from None
    try:
        return yaml.safe_load(text)
    except (yaml.YAMLError, ValueError, RecursionError) as failure:
        raise ConfigError(f"--config {path} is not YAML: {' '.join(str(failure).split())}. Fix the file.") from None
