"""`--train-weighted-split-paths-path FILE` and the like: groups of weighted sources, read from a file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.errors import ConfigError
from megatron.files.settings import read_text
from megatron.secret_text import guarded


def read_group_files(values: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Replaces each `--*-weighted-split-paths-path FILE` by the groups the file holds.

    Source: the file format is bigscience Megatron-DeepSpeed's: one line, each group in double quotes, a blank between
    groups.
    """
    complete, problems = dict(values), []
    for split in ("train", "valid", "test"):
        place, file_place = f"data.{split}_weighted_split_paths", f"data.{split}_weighted_split_paths_path"
        path = values.get(file_place)
        if path is None:
            continue
        name = f"--{split}-weighted-split-paths"
        if place in values:
            problems.append(f"{name} and {name}-path are both given. Drop one of them.")
            continue
        try:
            complete[place] = _read_group_file(path, f"{name}-path")
        except ConfigError as failure:
            problems.extend(failure.problems)
    return complete, problems


def _read_group_file(path: str, name: str) -> tuple[str, ...]:
    line = read_text(path, f"{name} {path}").strip()
    if len(line.splitlines()) != 1 or len(line) < 2 or line[0] != '"' or line[-1] != '"':
        raise ConfigError(
            f'{name} {path} must hold one line of groups in double quotes: "NAME: W S:E PREFIX" "NAME: ...".'
        )
    return tuple(map(guarded, line[1:-1].split('" "')))
