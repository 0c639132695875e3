"""How Parquet windows are named: a file, a pattern, or the path before the numbers of shards, `<path>-00000-of-00003`.

Source: the names are those of Apache Beam's `WriteToParquet`, from jax-lm-training's `preprocess.py`.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import Sequence

from megatron.errors import DataError

_SHARD_NAME = re.compile(r"(?P<path>.*)-(?P<number>\d{5,})-of-(?P<count>\d{5,})(?P<suffix>\.parquet)?", re.DOTALL)


def shard_name(path: str, number: int, count: int) -> str:
    """The name of one of `count` shards, counted from 0."""
    return f"{path}-{number:05d}-of-{count:05d}"


def is_shard_of(path: str, candidate: str) -> bool:
    """Whether a file is named as a shard of an output path, of however many."""
    shard = _SHARD_NAME.fullmatch(candidate)
    return shard is not None and shard["path"] == path


def names_windows(value: str) -> bool:
    """Whether a value of `--data-path` means Parquet windows: a Parquet file, a pattern that gives some, or the path
    before the shards' numbers.
    """
    if os.path.exists(f"{value}.idx"):
        return False
    if value.endswith(".parquet"):
        return True
    return any(_SHARD_NAME.fullmatch(path) or path.endswith(".parquet") for path in _matches(value))


def expand_windows(values: Sequence[str]) -> tuple[str, ...]:
    """The files that values of `--data-path` or `--windows` name, in the order of their rows.

    A value is a file, a pattern, or the path before the shards' numbers (`out/wt.train`).

    Raises:
        DataError: a value names nothing; shards are missing, or there are shards of two runs.
    """
    paths: list[str] = []
    for value in values:
        matches = _matches(value)
        if not matches:
            raise DataError(
                f"{value} names no Parquet file: there is no such file, none matches it, and there is no "
                f"{shard_name(value, 0, 1)[:-5]}NNNNN. Give a file, a pattern, or the --output-path of "
                "tools/corpus/featurize.py."
            )
        if matches != [value]:
            _check_complete(value, matches)
        paths.extend(sorted(matches, key=_shard_order))
    return tuple(paths)


def _matches(value: str) -> list[str]:
    if os.path.isfile(value):
        return [value]
    if glob.has_magic(value):
        return [path for path in glob.glob(value) if os.path.isfile(path)]
    pattern = f"{glob.escape(value)}-[0-9]*-of-[0-9]*"
    return [path for path in glob.glob(pattern) if is_shard_of(value, path)]


def _shard_order(path: str) -> tuple[str, int]:
    shard = _SHARD_NAME.fullmatch(path)
    return (path, 0) if shard is None else (shard["path"], int(shard["number"]))


def _check_complete(value: str, paths: list[str]) -> None:
    """Checks that the shards among the files are all shards of their runs."""
    numbers: dict[str, dict[int, set[int]]] = {}
    for path in paths:
        shard = _SHARD_NAME.fullmatch(path)
        if shard is not None:
            numbers.setdefault(shard["path"], {}).setdefault(int(shard["count"]), set()).add(int(shard["number"]))
    for path, counts in numbers.items():
        if len(counts) > 1:
            raise DataError(
                f"{value} names shards of {len(counts)} runs: {path} in {' and in '.join(map(str, sorted(counts)))} "
                "shards. Remove those that are not meant, or name the files of one run."
            )
        for count, present in counts.items():
            missing = next((number for number in range(count) if number not in present), None)
            if missing is not None:
                raise DataError(
                    f"{shard_name(path, missing, count)} is missing: {len(present)} of {count} shards are there. "
                    "Fetch it, or make the windows again; name single files to read only those."
                )
